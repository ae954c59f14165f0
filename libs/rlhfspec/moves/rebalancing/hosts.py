"""Number of engines to run on a host: they share memory bandwidth, so fewer, fuller ones can be faster.

With k of n engines a host takes `F_k = t0_k * longest + c_k * max(longest, sum / k)`; t0 and c are interpolated between
one engine alone and all n. A consolidating host exchanges nothing with others, to prevent oscillation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.common.arrays import BoolArray, Floats
from rlhfspec.moves.rebalancing.fleet import Fleet, Ints, PlannerSettings

_SAME_SPEED = 0.97  # share of the step time; an engine that still takes this much when alone on its host shares nothing


@dataclass(frozen=True, slots=True)
class Running:
    step_seconds: Floats
    sequence_seconds: Floats
    is_closing: BoolArray
    num_kept: Ints  # [N]: engines kept on its host
    apart: Ints  # [N]: its host if that consolidates, else -1


def engines_to_run(fleet: Fleet, settings: PlannerSettings) -> Running:
    """Choose engines to close, on hosts with one weights version where fewer engines are faster and have room."""
    closing, kept = np.zeros(fleet.num_generators, bool), np.zeros(fleet.num_generators, np.int64)
    apart = np.full(fleet.num_generators, -1)
    step, sequence = fleet.step_seconds.copy(), fleet.sequence_seconds.copy()
    total, longest = fleet.work()
    for host in _hosts_to_ask(fleet, settings).tolist():
        engines = np.flatnonzero((fleet.host == host) & fleet.takes_part)
        number = _best_number(fleet, engines, total[engines], longest[engines], settings)
        step[engines], sequence[engines] = _curves(fleet, engines, number)
        order = np.argsort(-(step * longest + sequence * total)[engines], kind="stable")
        closing[engines[order[number:]]] = True
        kept[engines] = number
        apart[engines] = host if number < len(engines) else -1
    return Running(step, sequence, closing, kept, apart)


def _hosts_to_ask(fleet: Fleet, settings: PlannerSettings) -> Ints:
    staying = fleet.takes_part
    hosts, place = np.unique(fleet.host[staying], return_inverse=True)
    several = np.bincount(place, minlength=len(hosts)) > 1
    if not several.any():
        return np.zeros(0, np.int64)
    is_faster_alone = (fleet.alone_step_seconds < fleet.step_seconds * _SAME_SPEED)[staying]
    gains = (np.bincount(place, weights=is_faster_alone, minlength=len(hosts)) > 0) | (settings.engine_cost > 0)
    versions = fleet.weights_version[staying]
    oldest, newest = np.full(len(hosts), 1 << 60), np.full(len(hosts), -1)
    np.minimum.at(oldest, place, versions)
    np.maximum.at(newest, place, versions)
    is_busy = np.bincount(place, weights=np.bincount(fleet.generator, minlength=fleet.num_generators)[staying]) > 0
    return np.asarray(hosts[several & gains & (oldest == newest) & is_busy])


def _best_number(fleet: Fleet, engines: Ints, total: Floats, longest: Floats, settings: PlannerSettings) -> int:
    """Return the number of engines to run: the present one, unless another is clearly faster."""
    now = max(int((total > 0).sum()), 1)
    costs = [
        _cost(fleet, engines, number, float(total.sum()), float(longest.max()), settings)
        if number >= now or _has_room(fleet, engines, number)
        else np.inf
        for number in range(1, len(engines) + 1)
    ]
    best = int(np.argmin(costs)) + 1
    return best if costs[best - 1] < costs[now - 1] * (1 - settings.consolidating_share) else now


def _cost(fleet: Fleet, engines: Ints, number: int, total: float, longest: float, settings: PlannerSettings) -> float:
    step, sequence = _curves(fleet, engines, number)
    seconds = step.mean() * longest + sequence.mean() * max(longest, total / number)
    return float(seconds * (1 + settings.engine_cost * number))


def _curves(fleet: Fleet, engines: Ints, number: int) -> tuple[Floats, Floats]:
    """Return engines' step and sequence seconds, interpolated, if `number` of them run."""
    share = (number - 1) / max(len(engines) - 1, 1)
    alone_step, alone_sequence = fleet.alone_step_seconds[engines], fleet.alone_sequence_seconds[engines]
    step = alone_step + (fleet.step_seconds[engines] - alone_step) * share
    return step, alone_sequence + (fleet.sequence_seconds[engines] - alone_sequence) * share


def _has_room(fleet: Fleet, engines: Ints, number: int) -> bool:
    held, need = (
        np.bincount(fleet.generator, tokens, minlength=fleet.num_generators)[engines]
        for tokens in (fleet.held, fleet.held + fleet.remaining)
    )
    rows = np.bincount(fleet.generator, minlength=fleet.num_generators)[engines]
    has_rows = _sum_of_largest(fleet.free_rows[engines] + rows, number) >= float(rows.sum())
    return has_rows and _sum_of_largest(fleet.free_tokens[engines] + held, number) >= float(need.sum())


def _sum_of_largest(capacities: Floats | Ints, number: int) -> float:
    return float(np.sort(capacities)[-number:].sum())
