"""What a user sees of a run: the live view, plots, traces as waterfalls, the summary."""
