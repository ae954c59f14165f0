"""Policies of the simulator: `ours`, which runs production's `plan()`, and published rules to compare with.

Each maps a `FleetSnapshot` to sequences and their destinations. Published rules move the sequence with the shortest
context, which is the cheapest.

Example:
    >>> from rlhfspec.simulator.simulator import PRESETS, Scenario, simulate, workload
    >>> scenario = Scenario(num_generators=2, curve=PRESETS["t0=2.5c"])
    >>> work = workload("skew", num_generators=2, per_generator=32, seed=1)
    >>> ours = simulate(scenario, work, policy_named("ours", work))
    >>> ours.seconds < 0.8 * simulate(scenario, work).seconds, ours.num_swings
    (True, 0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from rlhfspec.common.arrays import BoolArray
from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.moves.rebalancing.fleet import MUCH, STANDARD, Fleet, PlannerSettings
from rlhfspec.moves.rebalancing.plan import plan
from rlhfspec.moves.rebalancing.residual import Residual
from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.scenario import FleetSnapshot, Policy

Name = Literal["none", "threshold", "knee", "counts", "ours", "ours-knowing"]
POLICY_NAMES: tuple[str, ...] = get_args(Name)


def policy_named(
    name: str, work: Workload, *, history: Ints | None = None, settings: PlannerSettings = STANDARD
) -> Policy | None:
    """Return a policy, or None for `none`; `ours` first learns from `history`, the lengths of an earlier step."""
    policy_known(name)
    if name == "none":
        return None
    if name.startswith("ours"):
        ours = Ours(work, settings=settings, knows_lengths=name == "ours-knowing")
        if history is not None:
            ours.learn(history)
        return ours
    return {"threshold": threshold, "knee": knee, "counts": counts}[name]


def policy_known(name: str) -> None:
    """Raise InvalidRequest with the nearest name if the policy is unknown."""
    if name not in POLICY_NAMES:
        reason = f"must be one of {', '.join(POLICY_NAMES)}{did_you_mean(name, POLICY_NAMES)}"
        raise InvalidRequest("policy", name, reason)


@dataclass(slots=True)
class Ours:
    """Policy that runs `plan()` with remaining lengths estimated from those seen so far."""

    work: Workload
    settings: PlannerSettings = STANDARD
    knows_lengths: bool = False
    residual: Residual = field(init=False)

    def __post_init__(self) -> None:
        self.residual = Residual()

    def learn(self, lengths: Ints) -> None:
        for length in lengths[-4096:].tolist():  # the most that `Residual` keeps
            self.residual.learn(length, is_censored=length >= self.work.limit)

    def __call__(self, snapshot: FleetSnapshot, now: float) -> tuple[Ints, Ints]:
        self.learn(snapshot.ended)
        planned = plan(self.fleet(snapshot, now), now, self.settings)
        return planned.sequence, planned.destination

    def fleet(self, snapshot: FleetSnapshot, now: float) -> Fleet:
        limit = self.work.limit - snapshot.generated
        if self.knows_lengths:
            remaining = (self.work.lengths[snapshot.ids] - snapshot.generated).astype(np.float64)
        else:
            remaining = self.residual.remaining(snapshot.generated, np.ones(len(limit)), limit)
        count = len(snapshot.free_rows)
        return Fleet(
            step_seconds=snapshot.step_seconds,
            sequence_seconds=snapshot.sequence_seconds,
            alone_step_seconds=snapshot.alone_step_seconds,
            alone_sequence_seconds=snapshot.alone_sequence_seconds,
            prefill_owed=snapshot.prefill_owed,
            free_rows=snapshot.free_rows,
            free_tokens=np.full(count, MUCH),
            weights_version=np.zeros(count, np.int64),
            is_leaving=~snapshot.is_alive,
            is_prefilling=np.zeros(count, bool),
            host=snapshot.host,
            generator=snapshot.generator,
            generated=snapshot.generated,
            held=snapshot.held,
            remaining=remaining,
            limit=limit,
            moved_at=np.where(snapshot.is_moving, now, snapshot.moved_at),
        )


def threshold(snapshot: FleetSnapshot, now: float) -> tuple[Ints, Ints]:
    """Move one sequence from each generator with few free rows per sequence to one with many, as Llumnix does."""
    have = _have(snapshot)
    freeness = snapshot.free_rows / np.maximum(have, 1)
    rows = have + snapshot.free_rows
    # 32 of 256 rows in use is a freeness of 7: full generators send to those that are half as full
    sources = np.flatnonzero((freeness < np.median(rows) / 16 - 1) & (have > 1))
    destinations = np.flatnonzero((freeness > np.median(rows) / 8 - 1) & _may_take(snapshot))
    sources = sources[np.argsort(freeness[sources], kind="stable")]
    destinations = destinations[np.argsort(-freeness[destinations], kind="stable")]
    pairs = min(len(sources), len(destinations))
    surplus = np.zeros(len(have), dtype=np.int64)
    surplus[sources[:pairs]] = 1
    return _matched(snapshot, surplus, sources[:pairs], destinations[:pairs])


def knee(snapshot: FleetSnapshot, now: float) -> tuple[Ints, Ints]:
    """Move sequences off generators with more than 2 t0 / c (two thirds of peak throughput) to those with fewer."""
    have = _have(snapshot)
    with np.errstate(divide="ignore"):
        most = 2 * snapshot.step_seconds / snapshot.sequence_seconds
    most = np.minimum(np.maximum(np.nan_to_num(most, posinf=2**31), 1), 2**31).astype(np.int64)
    lack = np.where(_may_take(snapshot), np.minimum(np.maximum(most - have, 0), snapshot.free_rows), 0)
    return _levelled(snapshot, np.maximum(have - most, 0), lack, have)


def counts(snapshot: FleetSnapshot, now: float) -> tuple[Ints, Ints]:
    """Equalize the number of sequences on all generators."""
    have, takes = _have(snapshot), _may_take(snapshot) | (_have(snapshot) > 0)
    mean, extra = divmod(int(have.sum()), max(int(takes.sum()), 1))
    target = np.where(takes, mean, 0)
    fullest = np.argsort(-np.where(takes, have, -1), kind="stable")
    target[fullest[:extra]] += 1
    lack = np.minimum(np.maximum(target - have, 0), np.maximum(snapshot.free_rows, 0))
    return _levelled(snapshot, np.maximum(have - target, 0), lack, have)


def _have(snapshot: FleetSnapshot) -> Ints:
    return np.bincount(snapshot.generator, minlength=len(snapshot.free_rows))


def _may_take(snapshot: FleetSnapshot) -> BoolArray:
    return np.asarray(snapshot.is_alive & (snapshot.free_rows > 0))


def _levelled(snapshot: FleetSnapshot, surplus: Ints, lack: Ints, have: Ints) -> tuple[Ints, Ints]:
    """Return moves from generators with a `surplus`, fullest first, to those with a `lack`, emptiest first."""
    emptiest = np.argsort(have, kind="stable")
    destinations = np.repeat(emptiest, lack[emptiest])
    fullest = np.argsort(-have, kind="stable")
    sources = np.repeat(fullest, surplus[fullest])
    pairs = min(len(sources), len(destinations))
    wanted = np.bincount(sources[:pairs], minlength=len(have))
    return _matched(snapshot, wanted, sources[:pairs], destinations[:pairs])


def _matched(snapshot: FleetSnapshot, wanted: Ints, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
    """Return `wanted[g]` sequences of each generator g, shortest contexts first, and their destinations."""
    order = np.lexsort((snapshot.held, snapshot.is_moving, snapshot.generator))
    starts = np.searchsorted(snapshot.generator, np.arange(len(wanted)))
    rank = np.arange(len(order)) - starts[snapshot.generator]  # sorting leaves generators in place
    movable = ~snapshot.is_moving[order]
    chosen = order[(rank < wanted[snapshot.generator]) & movable]
    by_source = np.argsort(sources, kind="stable")
    place = np.searchsorted(sources[by_source], snapshot.generator[chosen])
    nth = np.arange(len(chosen)) - np.searchsorted(snapshot.generator[chosen], snapshot.generator[chosen])
    return chosen, destinations[by_source[place + nth]]
