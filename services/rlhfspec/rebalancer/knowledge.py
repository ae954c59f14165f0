"""Fleet state of the rebalancer. A restart recovers it within a second."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.messages.records import Load, Move, Moved, Sample
from rlhfspec.moves.rebalancing.curve import LearnedCurve
from rlhfspec.moves.rebalancing.elastic import Elastic, StageOutlook, Wanted
from rlhfspec.moves.rebalancing.factors import Factors
from rlhfspec.moves.rebalancing.fleet import STANDARD, Fleet
from rlhfspec.moves.rebalancing.plan import plan
from rlhfspec.moves.rebalancing.planned import PlannedMoves
from rlhfspec.moves.rebalancing.residual import Residual

QUIET_SECONDS = 2.0  # generators silent for longer are left out
MOVE_SECONDS = 5.0  # a move without a report by then counts as over
MOST_REST_SECONDS = 16.0  # longest backoff of a sample after refused moves
_CURVE_NOISE = 0.15  # curves within this share of the fleet's count as equal: the rest is noise
_PAUSE_RATE = 0.1
_KEPT_RESTS = 1 << 14


@dataclass(slots=True)
class _KnownGenerator:
    load: Load
    heard_at: float
    places: dict[str, int]  # index of each sample in the load's arrays
    gone: set[int] = field(default_factory=set)  # finished since


@dataclass(frozen=True, slots=True)
class _UnderWay:
    source: int
    destination: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class SeenFleet:
    fleet: Fleet
    workers: tuple[int, ...]
    sample_ids: list[str]

    def name(self, index: int) -> str:
        return f"generator {self.workers[index]}"


@dataclass(frozen=True, slots=True)
class Advice:
    planned: PlannedMoves
    seen: SeenFleet
    moves: tuple[Move, ...]


class StageWork:
    """Estimate of a step's samples still to generate. `rows`: concurrent samples per generator."""

    def __init__(self, *, samples_per_step: int, max_tokens: int, rows: int) -> None:
        self.step = 0
        self._samples_per_step, self._rows = samples_per_step, rows
        self._finished: set[str] = set()
        self._usual_longest = self._longest = max_tokens  # of the last and this step; at first the limit

    def loaded(self, load: Load) -> None:
        if load.step > self.step:
            if self._finished:
                self._usual_longest = self._longest
            self.step, self._finished, self._longest = load.step, set(), 0

    def finished(self, sample: Sample) -> None:
        if sample.purpose == "training" and sample.step == self.step:
            self._finished.add(sample.id)
            self._longest = max(self._longest, len(sample.token_ids))

    def num_to_come(self, there: Iterable[str]) -> int:
        known = self._finished | {id for id in there if id.split("/")[1] == str(self.step)}
        return max(self._samples_per_step - len(known), 0)

    def outlook(self, fleet: Fleet, there: Iterable[str], usual_tokens: float) -> StageOutlook:
        num_to_come = self.num_to_come(there)
        begun = self._usual_longest - int(fleet.generated.min(initial=self._usual_longest))
        longest = max(float(fleet.remaining.max(initial=0.0)), float(self._usual_longest if num_to_come else begun))
        return StageOutlook(
            step_seconds=float(np.median(fleet.step_seconds)),
            sequence_seconds=float(np.median(fleet.sequence_seconds)),
            tokens=float(fleet.remaining.sum()) + num_to_come * usual_tokens,
            longest=longest,
            rows=self._rows,
            prefill_seconds=float(fleet.prefill_owed.sum()),
        )


class FleetKnowledge:
    """State of all generators. `work` and `elastic` are set if the number of generators varies."""

    def __init__(
        self,
        job: str,
        *,
        max_tokens: int,
        began_at: float,
        draw: Callable[[int], str],
        work: StageWork | None = None,
        elastic: Elastic | None = None,
        learns: bool = False,
        num_prefilling: int = 0,
    ) -> None:
        self._job, self._max_tokens, self._draw = job, max_tokens, draw
        self._pause, self._learns, self._num_prefilling = STANDARD.pause_seconds, learns, num_prefilling
        self._plans_from = began_at + STANDARD.rest_seconds  # samples that just moved rest
        self._generators: dict[int, _KnownGenerator] = {}
        self._earlier: dict[int, set[str]] = {}  # replaced incarnations
        self._among_others: dict[int, LearnedCurve] = {}
        self._alone: dict[int, LearnedCurve] = {}
        self._residual, self._factors = Residual(), Factors()
        self._work, self._elastic = work, elastic
        self.wanted: Wanted | None = None  # wanted generators; None: unknown
        self._under_way: dict[str, _UnderWay] = {}
        self._settles_at: dict[int, float] = {}  # earlier loads do not show how a move ended
        self._rests: OrderedDict[str, tuple[float, int]] = OrderedDict()  # start of a sample's rest; refusals in a row
        self._num_moves = 0
        self._step = 0
        self._lengths: dict[str, tuple[int, list[int]]] = {}  # of the newest step, by group: prompt, responses

    @property
    def num_moves(self) -> int:
        return self._num_moves

    def loaded(self, load: Load, now: float) -> None:
        before = self._generators.get(load.worker)
        earlier = self._earlier.setdefault(load.worker, set())
        if load.incarnation in earlier:
            return
        if before is not None and before.load.incarnation != load.incarnation:
            earlier.add(before.load.incarnation)
        places = {sample: place for place, sample in enumerate(load.sample_ids)}
        self._generators[load.worker] = _KnownGenerator(load, now, places)
        if self._work is not None:
            self._work.loaded(load)
        self._learn_curve(load, now)

    def finished(self, sample: Sample) -> None:
        if self._work is not None:
            self._work.finished(sample)
        for generator in self._generators.values():
            if (place := generator.places.get(sample.id)) is not None:
                generator.gone.add(place)
        self._rests.pop(sample.id, None)
        if sample.finish_reason != "error":
            length = len(sample.token_ids)
            self._keep_length(sample, length)
            self._residual.learn(length, factor=self._factors.of(sample.group_id))
            self._factors.learn(sample.group_id, hash(sample.prompt_token_ids), length)

    def _keep_length(self, sample: Sample, length: int) -> None:
        if sample.purpose == "training" and sample.step > self._step:
            self._step, self._lengths = sample.step, {}
        if sample.purpose == "training" and sample.step == self._step:
            self._lengths.setdefault(sample.group_id, (len(sample.prompt_token_ids), []))[1].append(length)

    def costs(self) -> dict[str, object] | None:
        """Return learnt costs of the median generator and the newest step's lengths, for a simulation."""
        loads = [generator.load for generator in self._generators.values()]
        prefill = [load.prefill_seconds for load in loads if load.prefill_seconds]
        if not (prefill and self._lengths):
            return None
        step, sequence = (float(np.median(each)) for each in self._curves(loads, self._among_others))
        return {
            "step_seconds": step,
            "sequence_seconds": sequence,
            "prefill_seconds": float(np.median(prefill)),
            "pause_seconds": self._pause,
            "prompts": [{"tokens": tokens, "responses": each} for tokens, each in self._lengths.values()],
        }

    def moved(self, moved: Moved, now: float) -> None:
        is_planned = self._under_way.pop(moved.id, None) is not None
        if is_planned or moved.source >= self._num_prefilling:  # others hand over without pause
            self._settle(moved, now)
        if moved.how in ("kv", "tokens") and math.isfinite(moved.pause_seconds):
            self._pause += (max(moved.pause_seconds, 0.0) - self._pause) * _PAUSE_RATE

    def _settle(self, moved: Moved, now: float) -> None:
        for worker in (moved.source, moved.destination):
            self._settles_at[worker] = now
        _, refusals = self._rests.get(moved.sample_id, (now, 0))
        refusals = refusals + 1 if moved.how == "kept" else 0
        self._rest(moved.sample_id, now + min(2.0**refusals - 1, MOST_REST_SECONDS), refusals)

    def _rest(self, sample: str, since: float, refusals: int) -> None:
        self._rests.pop(sample, None)
        self._rests[sample] = (since, refusals)
        if len(self._rests) > _KEPT_RESTS:
            self._rests.popitem(last=False)

    def _learn_curve(self, load: Load, now: float) -> None:
        seconds = load.step_seconds + load.sequence_seconds * load.num_running
        if not (load.num_running and seconds > 0 and math.isfinite(seconds)):
            return
        prior = (load.step_seconds, load.sequence_seconds)
        others = [
            other.load.num_running > 0
            for worker, other in self._generators.items()
            if worker != load.worker and other.load.host == load.host and now - other.heard_at <= QUIET_SECONDS
        ]
        curves = self._alone if others and not any(others) else self._among_others
        curve = curves.setdefault(load.worker, LearnedCurve(prior))
        curve.learn(load.num_running, seconds)

    def advise(self, now: float) -> Advice | None:
        for move in [id for id, move in self._under_way.items() if move.ends_at <= now]:
            del self._under_way[move]
        if now < self._plans_from or (seen := self._fleet(now)) is None:
            return None
        self._look_ahead(seen, now)
        planned = plan(seen.fleet, now, replace(STANDARD, pause_seconds=self._pause, learns=self._learns))
        moves = tuple(self._begin(planned, seen, move, now) for move in range(planned.num_moves))
        return Advice(planned, seen, moves)

    def _look_ahead(self, seen: SeenFleet, now: float) -> None:
        if self._work is not None and self._elastic is not None:
            usual = float(self._residual.remaining([0], [1.0], [self._max_tokens])[0])
            outlook = self._work.outlook(seen.fleet, seen.sample_ids, usual)
            staying = int((~seen.fleet.is_leaving).sum())
            self.wanted = self._elastic.learn(self._work.step, outlook, now, num_generators=staying)

    def _begin(self, planned: PlannedMoves, seen: SeenFleet, move: int, now: float) -> Move:
        source, destination = (seen.workers[int(side[move])] for side in (planned.source, planned.destination))
        sample = seen.sample_ids[int(planned.sequence[move])]
        id = self._draw(self._num_moves)
        self._num_moves += 1
        self._under_way[id] = _UnderWay(source, destination, now + MOVE_SECONDS)
        self._rest(sample, now, self._rests.get(sample, (now, 0))[1])
        return Move(
            id=id,
            job=self._job,
            sample_id=sample,
            source=source,
            destination=destination,
            gain_seconds=float(planned.gain[move]),
            reason=planned.why_move(move, seen.name),
        )

    def _fleet(self, now: float) -> SeenFleet | None:
        heard = [self._generators[worker] for worker in sorted(self._generators)]
        heard = [generator for generator in heard if now - generator.heard_at <= QUIET_SECONDS]
        loads = [generator.load for generator in heard]
        if not loads:
            return None
        busy = {worker for move in self._under_way.values() for worker in (move.source, move.destination)}
        rests = [
            load.worker in busy or generator.heard_at <= self._settles_at.get(load.worker, -math.inf)
            for load, generator in zip(loads, heard, strict=True)
        ]
        counts = [len(load.sample_ids) for load in loads]
        sample_ids = [sample for load in loads for sample in load.sample_ids]
        generated = np.array([number for load in loads for number in load.num_generated], np.int64)
        limit = np.maximum(self._max_tokens - generated, 1)
        remaining = self._residual.remaining(generated, self._factors_of(sample_ids), limit)
        step, sequence = self._curves(loads, self._among_others)
        alone_step, alone_sequence = self._curves(loads, self._alone, (step, sequence))
        numbers = {host: number for number, host in enumerate(dict.fromkeys(load.host for load in loads))}
        fleet = Fleet.of(
            step_seconds=step,
            sequence_seconds=sequence,
            alone_step_seconds=alone_step,
            alone_sequence_seconds=alone_sequence,
            prefill_owed=[load.prefill_tokens * load.prefill_seconds for load in loads],
            free_rows=[0 if rest else load.num_free_rows for load, rest in zip(loads, rests, strict=True)],
            free_tokens=[load.num_free_tokens for load in loads],
            weights_version=[load.weights_version for load in loads],
            is_leaving=[load.is_leaving for load in loads],
            is_prefilling=[load.worker < self._num_prefilling for load in loads],
            host=[numbers[load.host] for load in loads],
            generator=np.repeat(np.arange(len(loads)), counts),
            generated=generated,
            held=[number for load in loads for number in load.num_held],
            remaining=remaining,
            limit=limit,
            moved_at=np.where(np.repeat(rests, counts), now, self._resting_since(sample_ids)),
        )
        return _without(SeenFleet(fleet, tuple(load.worker for load in loads), sample_ids), heard)

    def _factors_of(self, sample_ids: list[str]) -> Floats:
        return np.array([self._factors.of(sample.rpartition("/")[0]) for sample in sample_ids])

    def _resting_since(self, sample_ids: list[str]) -> Floats:
        never = (-math.inf, 0)
        return np.array([self._rests.get(sample, never)[0] for sample in sample_ids])

    def _curves(
        self, loads: list[Load], curves: dict[int, LearnedCurve], unknown: tuple[Floats, Floats] | None = None
    ) -> tuple[Floats, Floats]:
        """Return each generator's step costs (seconds per step, per sequence), the fleet's if unknown."""
        told = [
            (load.step_seconds, load.sequence_seconds) for load in loads if load.step_seconds + load.sequence_seconds
        ]
        usual = np.median(np.array(told), axis=0) if told else np.zeros(2)
        known = np.tile(usual, (len(loads), 1)) if unknown is None else np.stack(unknown, axis=1)
        for index, load in enumerate(loads):
            if (curve := curves.get(load.worker)) is not None:
                curve.prior = (float(usual[0]), float(usual[1])) if usual.sum() > 0 else curve.prior
                known[index] = curve.step_seconds, curve.sequence_seconds
        middle = np.median(known, axis=0)
        # Compare costs at a usual number of sequences: t0 and c alone are noisier than their sum.
        usual_number = max(float(np.mean([load.num_running for load in loads])), 1.0)
        cost, fleet_cost = known @ (1.0, usual_number), middle @ (1.0, usual_number)
        known[np.abs(cost - fleet_cost) <= _CURVE_NOISE * fleet_cost] = middle
        return known[:, 0].copy(), known[:, 1].copy()


def _without(seen: SeenFleet, heard: list[_KnownGenerator]) -> SeenFleet:
    fleet = seen.fleet
    first = fleet.starts
    gone = np.array([first[index] + place for index, each in enumerate(heard) for place in each.gone], np.int64)
    if not len(gone):
        return seen
    stays = np.ones(fleet.num_sequences, bool)
    stays[gone] = False
    return SeenFleet(
        fleet.only(stays), seen.workers, [id for id, here in zip(seen.sample_ids, stays, strict=True) if here]
    )
