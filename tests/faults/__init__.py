"""Seeded faults against whole runs (`make faults`).
A failing run prints its seed: PYTHONPATH=tests python -m faults --seed 7 --faults 40
"""
