"""Pure decisions about a job from everything that is known of it."""
