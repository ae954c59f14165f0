"""Writing, continuing and reading the run folder."""
