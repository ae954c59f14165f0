"""Output of a run: the run folder, the live view, plots, trackers and the summary.

This package makes no decisions. It imports torch and matplotlib only where their writers are used."""
