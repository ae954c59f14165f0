"""Displays of a run: live view, plots, waterfalls of traces, and summary."""
