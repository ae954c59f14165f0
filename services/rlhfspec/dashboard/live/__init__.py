"""Live state of a run, as events for browsers."""
