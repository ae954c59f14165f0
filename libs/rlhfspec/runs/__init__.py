"""Output of a run: the run folder, live view, plots, trackers and summary."""
