"""What a plan may do, and when it is worth it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    pause_seconds: float = 0.02  # of one move: about a step of the destination and 5 ms
    num_rounds: int = 4  # so many moves a generator and plan
    least_share: float = 0.05  # two whose ends differ by less of the later end are alike
    least_pauses: float = 4.0  # nor by so many pauses
    rest_seconds: float = 0.5  # between two moves of one sequence
    moves_of_leaving: int = 32  # a generator that is leaving, or is to be empty, hands over at most so many a plan
    engine_cost: float = 0.0  # of another running engine, as a share of the time until its host is done
    consolidating_share: float = 0.05  # fewer or more engines of a host must be faster by this
    scoring_seconds: float = 1.0  # a generator that stays dry for longer may do other work
    learns: bool = False  # the drafters of the generators learn


STANDARD = PlannerSettings()
