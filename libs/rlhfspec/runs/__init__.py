"""Output of a run: step metrics, the run folder, the live view, plots, trackers and the summary.

This package makes no decisions and imports neither torch nor matplotlib.
"""
