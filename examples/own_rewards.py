"""Rewards of own-data.yaml and smollm2.yaml. A function gets what it names: prompt, completion, the data's columns."""


def names_the_place(completion: str, place: str, finish_reason: str) -> float:
    """1 for a sentence that names the place and ends, half for one without an end, 0 without the place.

    The stop string "." that ends it is cut from the completion; `finish_reason` says that it was there.
    """
    if place not in completion:
        return 0.0
    return 1.0 if finish_reason == "stop" else 0.5


def is_the_answer(completion: str, answer: str) -> float:
    """1 for the answer and nothing else, else 0."""
    return float(completion.strip() == answer)
