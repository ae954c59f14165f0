"""Displays of a run for users: the live view, plots, waterfalls of traces, and the summary."""
