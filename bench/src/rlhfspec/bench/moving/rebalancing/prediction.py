"""Predicted seconds of a stage, simulated with measured curves: of every arm and of ideally shared work.

Example: with 10 ms per token at any batch, only the longest sequence matters.
    >>> from rlhfspec.bench.moving.rebalancing.workloads import StageWorkload
    >>> flat = MeasuredCurve(sizes=(1, 64), alone=(0.01, 0.01), busy=(0.01, 0.01), prefill_seconds=0.0)
    >>> stage = StageWorkload.of("skew", seed=1)
    >>> found = predict(stage, flat, clairvoyant(stage, flat), earlier=[])
    >>> round(found["ideal"] / (max(stage.lengths) * 0.01), 2), round(found["dealt"] / found["clairvoyant"], 2)
    (1.0, 1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfspec.bench.moving.pair import NUM_GENERATORS
from rlhfspec.bench.moving.rebalancing.arms import CLAIRVOYANT, DEALT, OURS, PULLED, PULLED_AT_ONCE
from rlhfspec.bench.moving.rebalancing.workloads import LONGEST_RESPONSE, StageWorkload
from rlhfspec.simulator.lengths import Workload
from rlhfspec.simulator.policies import policy_named
from rlhfspec.simulator.references import assign, ideal_sharing_seconds
from rlhfspec.simulator.scenario import Scenario
from rlhfspec.simulator.simulator import simulate
from rlhfspec.simulator.step_curves import StepCurve

IDEAL = "ideal"
ROWS = 64  # of a generator: all sequences of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """Seconds per token of each of sizes[i] sequences, with the neighbour idle or busy."""

    sizes: tuple[int, ...]
    alone: tuple[float, ...]
    busy: tuple[float, ...]
    prefill_seconds: float  # per prompt token

    @property
    def steps(self) -> StepCurve:
        return StepCurve(name="measured", num_sequences=self.sizes, alone=self.alone, busy=self.busy)

    @property
    def law(self) -> tuple[float, float]:
        """Return (t0, c) of a step's seconds `t0 + c * B`, fitted with the neighbour busy."""
        return self.steps.fitted(max(self.sizes), busy_share=1.0)


def clairvoyant(stage: StageWorkload, curve: MeasuredCurve) -> tuple[int, ...]:
    """Return each sequence's generator, placed with all lengths known."""
    return tuple(assign(_scenario(curve), workload_of(stage), engines_used=NUM_GENERATORS).tolist())


def predict(
    stage: StageWorkload, curve: MeasuredCurve, best: Sequence[int], earlier: Sequence[int]
) -> dict[str, float]:
    """Return predicted seconds by arm. `best`: the clairvoyant placement; `earlier`: lengths known to arm OURS."""
    work, dealt = workload_of(stage), _scenario(curve)
    ours = policy_named("ours", work, history=np.asarray(earlier, np.int64))
    return {
        DEALT: simulate(dealt, work).seconds,
        PULLED: simulate(replace(dealt, pulls=True, rows=PULLED_AT_ONCE), work).seconds,
        OURS: simulate(dealt, work, ours).seconds,
        CLAIRVOYANT: simulate(dealt, replace(work, dealt=np.asarray(best, np.int64))).seconds,
        IDEAL: ideal_sharing_seconds(dealt, work),
    }


def workload_of(stage: StageWorkload) -> Workload:
    return Workload(
        lengths=np.asarray(stage.lengths, np.int64),
        prompt_tokens=np.asarray([len(prompt) for prompt in stage.prompts], np.int64),
        prompts=np.asarray(stage.groups, np.int64),
        dealt=np.asarray(stage.dealt, np.int64),
        limit=LONGEST_RESPONSE,
    )


def _scenario(curve: MeasuredCurve) -> Scenario:
    return Scenario(
        num_generators=NUM_GENERATORS,
        curve=curve.steps,
        rows=ROWS,
        prefill_seconds=curve.prefill_seconds,
        engines_per_host=NUM_GENERATORS,
    )
