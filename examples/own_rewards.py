"""Rewards of own-data.yaml. A function gets what it names: prompt, completion, and columns of the data."""


def names_the_place(completion: str, place: str) -> float:
    """1 for one sentence that names the place, less for a longer answer, 0 without the place."""
    if place not in completion:
        return 0.0
    return 1.0 if completion.strip().endswith(".") else 0.5
