"""What a run shows and records: metrics of a step, the run folder, the live view, pictures, trackers, the summary.

Nothing here decides anything: what a stage reports goes in, files and pictures come out. Importing it costs no torch
and no matplotlib.
"""
