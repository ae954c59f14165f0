"""The web dashboard: read-only."""
