"""Benchmark of a stage on two unequally loaded generators: static, pulled, rebalanced, or clairvoyant placement.

Each generator has one process, engine thread and core. Arms (policies) alternate within every repetition, and ratios
compare arms of the same repetition. Every arm must give the same tokens and log-probs, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlhfspec.bench.bars import bars_of_rebalance
from rlhfspec.bench.generating.results import published
from rlhfspec.bench.moving.pair import NUM_GENERATORS, Pair, sequences_of
from rlhfspec.bench.moving.rebalancing.arms import ARMS, CLAIRVOYANT, OURS, PULLED, Arm, Placed, Pulled
from rlhfspec.bench.moving.rebalancing.calibration import SIZES, EngineStepTold, calibrate, told
from rlhfspec.bench.moving.rebalancing.prediction import ROWS, MeasuredCurve, clairvoyant, predict
from rlhfspec.bench.moving.rebalancing.rebalancer import RunsRebalancer
from rlhfspec.bench.moving.rebalancing.results import RebalanceResults, StageResult, StageRun, digest_of
from rlhfspec.bench.moving.rebalancing.workloads import (
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    SHORTEST,
    WORKLOADS,
    StageWorkload,
    earlier_lengths,
    stages,
)
from rlhfspec.bench.processor import processor
from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.records import Load, Moved

_DECODING = {"adaptive": "adaptive", "plain": "off"}
PLAN_SECONDS = 0.25  # between two plans, as in a run
NUM_EARLIER = 256  # lengths of earlier steps that the rebalancer has seen

Report = Callable[[str], None]


class DifferentTokens(RuntimeError):
    """Raised when two arms of a stage differ in tokens or log-probs, which may not depend on placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceSettings:
    model: str
    draft: str | None
    workloads: tuple[str, ...] = WORKLOADS
    decoding: tuple[str, ...] = tuple(_DECODING)
    arms: tuple[str, ...] = ARMS
    sizes: tuple[int, ...] = SIZES
    seeds: int = 5
    repeats: int = 5  # of every stage and arm
    scale: float = 1.0  # below 1 for shorter responses
    dtype: str = "bfloat16"
    link: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("workloads", WORKLOADS), ("decoding", tuple(_DECODING)), ("arms", ARMS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidRequest(name, value, f"must be among {', '.join(known)}")
        for name in ("seeds", "repeats", "scale"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(name, getattr(self, name), "must be > 0")

    @property
    def limit(self) -> int:
        """Return the maximum response length, which is all that engines and rebalancer know of lengths."""
        return max(round(LONGEST_RESPONSE * self.scale), SHORTEST)


class RebalanceBenchmark:
    """Benchmark of all arms; `make_rebalancer` is called for every run of `ours`."""

    def __init__(
        self,
        settings: RebalanceSettings,
        report: Report = print,
        *,
        make_rebalancer: Callable[[float, int, Sequence[int]], RunsRebalancer] = RunsRebalancer,
    ) -> None:
        self._settings = settings
        self._make_rebalancer = make_rebalancer
        self._report = report
        self._earlier = earlier_lengths(NUM_EARLIER, settings.scale)
        self._num_runs = 0

    def run(self) -> RebalanceResults:
        settings = self._settings
        with Pair.start() as pair:
            self._report("loading the engines")
            loaded = pair.load(target=settings.model, draft=settings.draft, dtype=settings.dtype, link=settings.link,
                               num_threads=1, max_sequences=ROWS,
                               max_context=LONGEST_PROMPT + settings.limit + 32)  # fmt: skip
            curves: dict[str, MeasuredCurve] = {}
            results: list[StageResult] = []
            for decoding in settings.decoding:
                curve = calibrate(pair, _DECODING[decoding], settings.sizes, settings.limit, self._report)
                curves[decoding] = curve
                for workload in settings.workloads:
                    for stage in stages(workload, settings.seeds, settings.scale):
                        results.append(self._stage(pair, stage, decoding, curve))
        found = RebalanceResults(
            machine=processor(arithmetic=loaded["arithmetic"]),
            settings=published(settings, "model", "draft"),
            curves=curves,
            stages=tuple(results),
        )
        return replace(found, bars=bars_of_rebalance(found.rows))

    def _stage(self, pair: Pair, stage: StageWorkload, decoding: str, curve: MeasuredCurve) -> StageResult:
        best = clairvoyant(stage, curve)
        runs: dict[str, list[StageRun]] = {arm: [] for arm in self._settings.arms}
        digests: set[str] = set()
        for arm in self._turns():
            self._report(f"{decoding}, {stage.workload}, seed {stage.seed}: {arm} {len(runs[arm]) + 1}")
            run, digest = self._once(pair, stage, decoding, arm, best)
            runs[arm].append(run)
            digests.add(digest)
            if len(digests) > 1:
                raise DifferentTokens(f"{decoding}, {stage.workload}, seed {stage.seed}: {arm} gave other tokens")
        return StageResult(
            workload=stage.workload,
            decoding=decoding,
            seed=stage.seed,
            num_tokens=stage.num_tokens,
            imbalance=stage.imbalance,
            predicted=predict(stage, curve, best, self._earlier),
            runs={arm: tuple(made) for arm, made in runs.items()},
            digest=digests.pop(),
        )

    def _turns(self) -> Iterator[str]:
        """Yield the arm of each run; every repetition begins with another arm."""
        arms = self._settings.arms
        for repetition in range(self._settings.repeats):
            start = repetition % len(arms)
            yield from arms[start:] + arms[:start]

    def _once(
        self, pair: Pair, stage: StageWorkload, decoding: str, arm: str, best: tuple[int, ...]
    ) -> tuple[StageRun, str]:
        self._num_runs += 1
        name = f"run-{self._num_runs}"
        ids = [f"{name}/{group}/{index}" for index, group in enumerate(stage.groups)]
        seeds = [1_000_003 * stage.seed + index for index in range(stage.num_sequences)]
        made = sequences_of(ids, stage.prompts, stage.lengths, seeds, stage.groups, max_tokens=self._settings.limit)
        pair.ask_all("stage", "ready", name=name, speculation=_DECODING[decoding], sequences=made)
        chosen: Arm = Pulled(len(ids)) if arm == PULLED else Placed(best if arm == CLAIRVOYANT else stage.dealt)
        began = time.monotonic()
        rebalancer = self._make_rebalancer(began, self._settings.limit, self._earlier) if arm == OURS else None
        course = _Course(pair, stage, chosen, ids, rebalancer)
        course.run()
        ended = pair.ask_all("end", "ended")
        digests = ended[0]["digests"] | ended[1]["digests"]
        assert set(digests) == set(ids), "every sequence ends once"
        run = StageRun(
            arm=arm,
            seconds=max(course.ends) - began,
            ends=tuple(end - began for end in course.ends),
            active=tuple(activity(told(one), began) for one in ended),
            moves=tuple((at - began, moved.source, moved.destination) for at, moved in course.moved),
            kept=tuple(moved.reason for moved in course.kept),
        )
        return run, digest_of(digests[name] for name in ids)


@dataclass(slots=True)
class _Course:
    """Run of one stage under one arm, until the last token and the last reply to a move."""

    pair: Pair
    stage: StageWorkload
    arm: Arm
    ids: list[str]
    rebalancer: RunsRebalancer | None
    ends: list[float] = field(default_factory=lambda: [0.0] * NUM_GENERATORS)
    moved: list[tuple[float, Moved]] = field(default_factory=list)
    kept: list[Moved] = field(default_factory=list)
    num_moving: int = 0
    planned_at: float = float("-inf")

    def run(self) -> None:
        for number, indices in enumerate(self.arm.first()):
            self.pair.tell(number, "go", ids=[self.ids[i] for i in indices])
        left = len(self.ids)
        while left or self.num_moving:
            number, said, rest = self.pair.hear()
            if said == "finished":
                left -= len(rest["ids"])
                self._finished(number, rest["ids"], rest["at"])
            elif said == "load" and self.rebalancer is not None:
                self.rebalancer.loaded(Load(**tupled(rest)), time.monotonic())
            elif said == "moved" and self.rebalancer is not None:
                self._moved(self.rebalancer, rest)
            if self.rebalancer is not None:
                self._plan(self.rebalancer)

    def _finished(self, number: int, ids: list[str], at: float) -> None:
        self.ends[number] = at
        if more := self.arm.more(number, len(ids)):
            self.pair.tell(number, "go", ids=[self.ids[i] for i in more])
        if self.rebalancer is not None:
            for index in map(self.ids.index, ids):
                self.rebalancer.finished(self.ids[index], self.stage.prompts[index], self.stage.lengths[index])

    def _plan(self, rebalancer: RunsRebalancer) -> None:
        """Plan moves and send them to their sources, at most once per PLAN_SECONDS."""
        now = time.monotonic()
        if now - self.planned_at < PLAN_SECONDS:
            return
        self.planned_at = now
        for move in rebalancer.moves(now):
            self.num_moving += 1
            self.pair.tell(move.source, "move", **asdict(move))

    def _moved(self, rebalancer: RunsRebalancer, told_of: dict[str, Any]) -> None:
        self.num_moving -= 1
        at = told_of.pop("at")
        moved = Moved(**told_of)
        rebalancer.moved(moved, time.monotonic())
        if moved.how == "kept":
            self.kept.append(moved)
        else:
            self.moved.append((at, moved))


def tupled(record: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON record with tuples for lists.

    >>> tupled({"id": "a", "sample_ids": ["b"]})
    {'id': 'a', 'sample_ids': ('b',)}
    """
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


def activity(steps: list[EngineStepTold], began: float) -> tuple[tuple[float, int], ...]:
    """Return (seconds since `began`, number of running sequences) at each change."""
    changes: list[tuple[float, int]] = []
    for step in steps:
        if not changes or changes[-1][1] != step.num_decoding:
            changes.append((round(step.at - began, 4), step.num_decoding))
    return tuple(changes)
