"""The read-only web dashboard."""
