"""Live state of a run in Redis."""
