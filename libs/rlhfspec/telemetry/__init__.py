"""Seeing a run: the line of a step, the folder of a run, the live view, pictures, trackers, the last summary.

Nothing here decides anything: what a stage reports goes in, files and pictures come out. Importing it costs no torch
and no matplotlib.
"""
