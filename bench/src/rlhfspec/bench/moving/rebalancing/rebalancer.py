"""Production's rebalancer, for one stage of `rlhfspec bench rebalance`."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfspec.messages.records import Load, Move, Moved, Sample
from rlhfspec.moves.rebalancing.fleet import STANDARD
from rlhfspec.rebalancer.knowledge import FleetKnowledge


class RunsRebalancer:
    """Rebalancer as in the middle of a job: it has learnt from `earlier` response lengths. Times are monotonic."""

    def __init__(self, now: float, limit: int, earlier: Sequence[int]) -> None:
        began = now - STANDARD.rest_seconds  # as after a long time in a run
        self._knowledge = FleetKnowledge(
            "bench", max_tokens=limit, began_at=began, draw=lambda number: f"move-{number}"
        )
        for index, length in enumerate(earlier):
            self.finished(f"earlier/{index}/0", (index,), length)

    def loaded(self, load: Load, now: float) -> None:
        self._knowledge.loaded(load, now)

    def finished(self, sample_id: str, prompt: tuple[int, ...], length: int) -> None:
        nothing = (0.0,) * length
        self._knowledge.finished(
            Sample(
                id=sample_id, job="bench", step=0, prompt=0, replica=0, prompt_text="", prompt_token_ids=prompt,
                columns_json="{}", text="", token_ids=(0,) * length, log_probs=nothing, tempered_log_probs=nothing,
                weights_versions=(0,) * length, finish_reason="stop",
            )
        )  # fmt: skip

    def moved(self, moved: Moved, now: float) -> None:
        self._knowledge.moved(moved, now)

    def moves(self, now: float) -> tuple[Move, ...]:
        advice = self._knowledge.advise(now)
        return () if advice is None else advice.moves
