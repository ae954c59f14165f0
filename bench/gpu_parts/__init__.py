"""Parts of bench/gpu_day.py, each a function that takes a `Day`."""
