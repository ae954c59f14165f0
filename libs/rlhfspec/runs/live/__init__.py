"""The live state of a run in Redis."""
