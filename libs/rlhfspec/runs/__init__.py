"""Output of a run: the run folder, the live view, plots, trackers and the summary.

This package makes no decisions and imports neither torch nor matplotlib."""
