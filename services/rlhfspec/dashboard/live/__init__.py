"""What a run does right now, as events for browsers."""
