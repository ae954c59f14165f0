"""Fault schedules, a pure function of the seed. Example:

>>> schedule(7, 2, ["generator-0", "trainer-0"])[0]
Fault(after_step=4, delay_seconds=0.76, kind='kill', target='supervisor', seconds=0.0)
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "hold", "leave", "cut", "slow", "break", "corrupt"]
HELPERS = ("nats", "redis", "guardian", "launcher")
SUPERVISOR = "supervisor"
# Of a run with two workers of most stages; the supervisor's death is the dearest, for everybody starts anew.
SHARE_OF_HELPERS, SHARE_OF_SUPERVISOR = 0.2, 0.06
SHARE_OF_HOLDS, SHARE_OF_LEAVES = 0.1, 0.1  # beside kills
STEPS_A_WAVE = (4, 8)  # trained between two waves of faults
MOST_IN_A_WAVE = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault after a number of trained steps and a delay. hold: SIGSTOP for some seconds; leave: SIGTERM."""

    after_step: int
    delay_seconds: float
    kind: Kind
    target: str
    seconds: float = 0.0


def schedule(seed: int, num_kills: int, workers: Sequence[str], *, most_held_seconds: float = 3.0) -> list[Fault]:
    """Return kills, with holds and leaves between them, in waves that overlap."""
    draw = random.Random(seed)
    faults: list[Fault] = []
    step = STEPS_A_WAVE[0]
    while (left := num_kills - sum(fault.kind == "kill" for fault in faults)) > 0:
        for _ in range(min(draw.randint(1, MOST_IN_A_WAVE), left)):
            faults.append(_fault(draw, step, workers, most_held_seconds))
        step += draw.randint(*STEPS_A_WAVE)
    return faults


def _fault(draw: random.Random, step: int, workers: Sequence[str], most_held_seconds: float) -> Fault:
    delay, kind = round(draw.uniform(0.0, 0.8), 2), draw.random()
    if kind < SHARE_OF_HOLDS:
        held = round(draw.uniform(0.5, most_held_seconds), 1)
        return Fault(step, delay, "hold", draw.choice([*workers, "nats", "redis"]), held)
    if kind < SHARE_OF_HOLDS + SHARE_OF_LEAVES:
        return Fault(step, delay, "leave", draw.choice(workers))
    whom = draw.random()
    if whom < SHARE_OF_SUPERVISOR:
        return Fault(step, delay, "kill", SUPERVISOR)
    helpers = whom < SHARE_OF_SUPERVISOR + SHARE_OF_HELPERS
    return Fault(step, delay, "kill", draw.choice(HELPERS if helpers else workers))
