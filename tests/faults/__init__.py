"""Faults on a seeded schedule against a whole run of real processes, which must end as if nothing had happened.

`make faults` runs more of it. A failing run prints its seed:

    PYTHONPATH=tests python -m faults --seed 7 --faults 40
"""
