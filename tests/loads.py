"""Loads of generators, and the rebalancer's knowledge of them."""

from collections.abc import Sequence
from typing import Any

from small_job import JOB

from rlhfspec.messages.records import Load, Move, Moved
from rlhfspec.rebalancer.knowledge import FleetKnowledge

MAX_TOKENS = 1000


def a_load(worker: int, samples: Sequence[int], **changed: Any) -> Load:
    values: dict[str, Any] = {
        "id": f"{JOB}/generator-{worker}/load/0", "job": JOB, "generator": f"generator-{worker}", "step": 1,
        "num_running": len(samples), "num_waiting": 0, "num_finished": 0, "num_tokens": 0, "tokens_per_second": 1.0,
        "accepted_per_verification": None, "strategy": "off", "worker": worker, "incarnation": "a",
        "host": f"host-{worker}", "step_seconds": 1e-3, "sequence_seconds": 5e-4, "num_free_rows": 16,
        "num_free_tokens": 10_000, "sample_ids": tuple(sample_of(number) for number in samples),
        "num_generated": (10,) * len(samples), "num_held": (20,) * len(samples),
    }  # fmt: skip
    return Load(**(values | changed))


def sample_of(number: int) -> str:
    return f"{JOB}/1/{number}/0"


def moved(move: Move, how: Any = "kv", **changed: Any) -> Moved:
    return Moved(
        id=move.id, job=JOB, sample_id=move.sample_id, source=move.source, destination=move.destination, how=how,
        **changed,
    )  # fmt: skip


def knowing(began_at: float = 0.0, **options: Any) -> FleetKnowledge:
    numbers = iter(range(1 << 30))
    return FleetKnowledge(
        JOB, max_tokens=MAX_TOKENS, began_at=began_at, draw=lambda _: f"{began_at}/{next(numbers)}", **options
    )


def skewed(knowledge: FleetKnowledge, now: float, **changed: Any) -> None:
    knowledge.loaded(a_load(0, range(8)), now)
    knowledge.loaded(a_load(1, [], **changed), now)
