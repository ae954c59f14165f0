"""Base of every stage: bus, compute thread, supervision and vitals."""
