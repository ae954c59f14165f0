"""The parts of bench/gpu_day.py, each a function of a `Day`."""
