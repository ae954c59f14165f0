"""A stage of generation on two generators of unequal work: dealt, pulled, dealt and moved, or dealt by a clairvoyant.

Two processes, one thread and one core each. Arms take turns within every pair of repetitions, so that noise hits all
alike; ratios are taken within a repetition. Every arm must give the same tokens and log-probs, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhfspec.bench.moving.arms import ARMS, CLAIRVOYANT, DEALT, PULLED, Arm, Placed, Pulled
from rlhfspec.bench.moving.calibration import SIZES, EngineStepTold, calibrate, told
from rlhfspec.bench.moving.pair import NUM_GENERATORS, Pair, ids_of, sequences_of
from rlhfspec.bench.moving.rebalance_results import IDEAL, RebalanceResults, StageResult, StageRun, digest_of
from rlhfspec.bench.moving.sharing import Curve, clairvoyant, ideal_seconds, stage_seconds
from rlhfspec.bench.moving.workloads import WORKLOADS, Stage, stages
from rlhfspec.bench.processor import processor
from rlhfspec.errors import InvalidRequest

DECODING = {"adaptive": "adaptive", "plain": "off"}
MAX_CONTEXT = 1088  # a prompt of 96, a response of 960, and some room

Report = Callable[[str], None]


class DifferentTokens(RuntimeError):
    """Two arms of one stage generated different tokens or log-probs: the law is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    """repeats: of every stage and arm. scale: shorter responses, for a quick look."""

    model: str
    draft: str
    workloads: tuple[str, ...] = WORKLOADS
    decoding: tuple[str, ...] = tuple(DECODING)
    arms: tuple[str, ...] = ARMS
    seeds: int = 5
    repeats: int = 5
    scale: float = 1.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, known in (("workloads", WORKLOADS), ("decoding", tuple(DECODING)), ("arms", ARMS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidRequest(name, value, f"must be among {', '.join(known)}")
        for name in ("seeds", "repeats", "scale"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(name, getattr(self, name), "must be > 0")

    def published(self) -> dict[str, Any]:
        """For the JSON: models by the names of their folders, no path of the machine."""
        return asdict(self) | {name: Path(getattr(self, name)).name for name in ("model", "draft")}


class RebalanceBenchmark:
    def __init__(self, settings: RebalanceSettings, report: Report = print) -> None:
        self._settings = settings
        self._report = report
        self._num_runs = 0

    def run(self) -> RebalanceResults:
        settings = self._settings
        with Pair.start() as pair:
            self._report("loading the engines")
            [loaded, _] = pair.ask_all("load", "loaded", target=settings.model, draft=settings.draft,
                                       dtype=settings.dtype, num_threads=1, max_sequences=64,
                                       max_context=MAX_CONTEXT)  # fmt: skip
            curves = {
                decoding: calibrate(pair, DECODING[decoding], SIZES, settings.scale, self._report)
                for decoding in settings.decoding
            }
            results = tuple(
                self._stage(pair, stage, decoding, curves[decoding])
                for decoding in settings.decoding
                for workload in settings.workloads
                for stage in stages(workload, settings.seeds, settings.scale)
            )
        return RebalanceResults(
            machine=processor(arithmetic=loaded["arithmetic"]),
            settings=settings.published(),
            curves=curves,
            stages=results,
        )

    def _stage(self, pair: Pair, stage: Stage, decoding: str, curve: Curve) -> StageResult:
        prompt_lengths = [len(prompt) for prompt in stage.prompts]
        best = clairvoyant(stage.lengths, prompt_lengths, curve)
        runs: dict[str, list[StageRun]] = {arm: [] for arm in self._settings.arms}
        digests: set[str] = set()
        for arm in self._turns():
            self._report(f"{decoding}, {stage.workload}, seed {stage.seed}: {arm} {len(runs[arm]) + 1}")
            run, digest = self._once(pair, stage, decoding, arm, best)
            runs[arm].append(run)
            digests.add(digest)
            if len(digests) > 1:
                raise DifferentTokens(f"{decoding}, {stage.workload}, seed {stage.seed}: {arm} differs")
        return StageResult(
            workload=stage.workload,
            decoding=decoding,
            seed=stage.seed,
            num_tokens=stage.num_tokens,
            imbalance=stage.imbalance,
            predicted={
                DEALT: stage_seconds(stage.lengths, prompt_lengths, stage.dealt, curve),
                CLAIRVOYANT: stage_seconds(stage.lengths, prompt_lengths, best, curve),
                IDEAL: ideal_seconds(stage.lengths, prompt_lengths, curve),
            },
            runs={arm: tuple(made) for arm, made in runs.items()},
            digest=digests.pop(),
        )

    def _turns(self) -> Iterator[str]:
        """Every repetition begins with another arm."""
        arms = self._settings.arms
        for repetition in range(self._settings.repeats):
            start = repetition % len(arms)
            yield from arms[start:] + arms[:start]

    def _once(self, pair: Pair, stage: Stage, decoding: str, arm: str, best: tuple[int, ...]) -> tuple[StageRun, str]:
        self._num_runs += 1
        ids = ids_of(f"{stage.workload}-{stage.seed}", stage.num_sequences)
        seeds = [1_000_003 * stage.seed + index for index in range(stage.num_sequences)]
        made = sequences_of(ids, stage.prompts, stage.lengths, seeds, stage.groups)
        pair.ask_all("stage", "ready", name=f"run-{self._num_runs}", speculation=DECODING[decoding], sequences=made)
        chosen: Arm = Pulled(len(ids)) if arm == PULLED else Placed(best if arm == CLAIRVOYANT else stage.dealt)
        began = time.monotonic()
        ends = _drive(pair, chosen, ids)
        ended = pair.ask_all("end", "ended")
        digests = ended[0]["digests"] | ended[1]["digests"]
        assert set(digests) == set(ids), "every sequence ends once"
        run = StageRun(
            arm=arm,
            seconds=max(ends) - began,
            ends=tuple(end - began for end in ends),
            active=tuple(activity(told(one), began) for one in ended),
        )
        return run, digest_of(digests[name] for name in ids)


def _drive(pair: Pair, arm: Arm, ids: list[str]) -> list[float]:
    """Until every sequence has ended; when each generator finished its last."""
    for number, indices in enumerate(arm.first()):
        pair.tell(number, "go", ids=[ids[i] for i in indices])
    ends = [0.0] * NUM_GENERATORS
    left = len(ids)
    while left:
        number, said, rest = pair.hear()
        if said == "finished":
            left -= len(rest["ids"])
            ends[number] = rest["at"]
            if more := arm.more(number, len(rest["ids"])):
                pair.tell(number, "go", ids=[ids[i] for i in more])
    return ends


def activity(steps: list[EngineStepTold], began: float) -> tuple[tuple[float, int], ...]:
    """When how many began to run: only changes."""
    changes: list[tuple[float, int]] = []
    for step in steps:
        if not changes or changes[-1][1] != step.num_decoding:
            changes.append((round(step.at - began, 4), step.num_decoding))
    return tuple(changes)
