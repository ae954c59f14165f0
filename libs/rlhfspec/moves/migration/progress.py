"""How far a sequence is when it changes hands, for who looks on."""

from __future__ import annotations

import time

from rlhfspec.engine.base import SequenceState
from rlhfspec.engine.sequences import stats_of
from rlhfspec.telemetry.base import SampleProgress


def progress_of(state: SequenceState) -> SampleProgress:
    """Of one that an engine made, or has found right; now."""
    stats = stats_of(state.counters, state.strategies)
    return SampleProgress(
        num_moves=stats.num_moves,
        weights_versions=tuple(state.weights_versions.tolist()),
        num_verifications=stats.num_verifications,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        strategies=stats.strategies,
        at=time.time(),
    )
