"""What to do about a job now, from all that is known of it: pure, without a clock or a client."""
