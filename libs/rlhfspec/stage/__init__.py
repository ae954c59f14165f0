"""Base of every stage: its bus, compute thread, supervision and vital signs."""
