"""Metrics of a process for Prometheus and OTLP (docs/observability.md), as plain numbers converted on demand."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from rlhfspec.messages.records import Load, Moved, Record, Sample, StepReport, Weights
from rlhfspec.telemetry.base import SENT, Delivered, How, SampleProgress, WorkerPlace, sent_at

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[tuple[str, str], ...]  # sorted


class Times:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        limits = [*map(str, BOUNDS), "+Inf"]
        return list(zip(limits, map(float, accumulate(self.counts)), strict=True))


class Metric(NamedTuple):
    name: str
    what: str
    kind: Literal["counter", "gauge", "times"]
    values: list[tuple[Labels, float | Times]]


@dataclass(slots=True)
class _Records:
    published: int = 0
    there: int = 0  # duplicates
    taken: int = 0
    ended: dict[How, int] = field(default_factory=lambda: dict.fromkeys(get_args(How), 0))
    publish: Times = field(default_factory=Times)
    queue: Times = field(default_factory=Times)
    trip: Times = field(default_factory=Times)
    sent: dict[str, float] = field(default_factory=dict)  # publication times of records in hand


class Meters:
    """Watcher that counts records and measures times in one event loop. `metrics` may be called from any thread."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._records: dict[tuple[WorkerPlace, type], _Records] = defaultdict(_Records)
        self._work: dict[Labels, Times] = defaultdict(Times)
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._pauses: dict[Labels, Times] = defaultdict(Times)
        self._weights: dict[Labels, Times] = defaultdict(Times)
        # Counters of others, exported from the start: Prometheus sees no rise in a counter that starts at 1.
        self._elsewhere: dict[tuple[str, Labels], Callable[[], int]] = {}

    # --- records on the bus ------------------------------------------------------------------------------------------

    def publishing(self, place: WorkerPlace, record: Record) -> Mapping[str, str]:
        return {SENT: f"{self._now():.6f}"}

    def published(self, place: WorkerPlace, record: Record, began: float, is_new: bool) -> None:
        records = self._records[place, type(record)]
        records.published += is_new
        records.there += not is_new
        records.publish.add(self._now() - began)
        if isinstance(record, Load):
            self._loaded(place, record)
        elif isinstance(record, Moved):
            self._moved(place, record)
        elif isinstance(record, StepReport):
            self._trained(place, record)
        elif isinstance(record, Sample) and record.weights_versions:
            self._set("weights_version", record.weights_versions[-1], place, role="policy")
        elif isinstance(record, Weights):
            self._set("weights_version", record.version, place, role=record.role)

    def taken(self, place: WorkerPlace, record: Record, delivered: Delivered) -> None:
        records = self._records[place, type(record)]
        records.taken += 1
        if (sent := sent_at(delivered.headers)) is not None:
            records.sent[record.id] = sent
            if delivered.progress is None:  # otherwise it came from another worker, not a queue
                records.queue.add(self._now() - sent)

    def ended(
        self, place: WorkerPlace, record_type: type, id: str, how: How, progress: SampleProgress | None = None
    ) -> None:
        records = self._records[place, record_type]
        records.ended[how] += 1
        if (sent := records.sent.pop(id, None)) is not None and how == "ack":
            records.trip.add(self._now() - sent)

    # --- other events ------------------------------------------------------------------------------------------------

    def worked(self, stage: str, worker: int, what: str, seconds: float) -> None:
        """Count the work `what`, which took `seconds`; a callback for `Vitals.told`."""
        self._work[_labels(WorkerPlace(stage, worker), work=kind_of_work(what))].add(seconds)

    def took_weights(self, stage: str, worker: int, way: str, seconds: float) -> None:
        """Count an update of weights. `way`: `group` or `store` (docs/training.md)."""
        self._weights[_labels(WorkerPlace(stage, worker), way=way)].add(seconds)

    def reconnects(self, server: str, count: Callable[[], int]) -> None:
        self._elsewhere["reconnects", (("server", server),)] = count

    def restarts(self, stage: str, worker: int, count: Callable[[], int]) -> None:
        self._elsewhere["restarts", _labels(WorkerPlace(stage, worker))] = count

    def _loaded(self, place: WorkerPlace, load: Load) -> None:
        self._set("generator_tokens_per_second", load.tokens_per_second, place)
        self._set("generator_running", load.num_running, place)
        self._set("generator_waiting", load.num_waiting, place)
        for how, count in (("run", load.num_prefilled), ("found", load.num_found)):
            self._counts["generator_prefill_tokens", _labels(place, how=how)] = count
        if load.accepted_per_verification is not None:
            self._set("generator_accepted_per_verification", load.accepted_per_verification, place)
        for each in load.drafting:
            drafter = {"drafter": each.drafter}
            self._set("generator_tokens_per_verification", each.tokens_per_verification, place, **drafter)
            self._set("generator_draft_saved_seconds", each.saved_seconds, place, **drafter)
            if each.level_share is not None:
                self._set("generator_draft_level_share", each.level_share, place, **drafter)
            for depth, share in enumerate(each.acceptance, 1):
                self._set("generator_draft_acceptance", share, place, **drafter, depth=str(depth))
        if load.drafter_version:
            self._set("generator_learning_seconds", load.learning_seconds, place, how="spent")
            self._set("generator_learning_seconds", load.saved_seconds, place, how="saved")
            self._set("generator_drafter_version", load.drafter_version, place)
        if load.strategy:  # the strategy of most recent steps
            self._counts["generator_strategies", _labels(place, strategy=load.strategy)] += 1

    def _trained(self, place: WorkerPlace, report: StepReport) -> None:
        self._set("step", report.step, place)
        told = asdict(report.metrics)
        for name, (key, part) in _OF_A_STEP.items():
            value = told.get(key) if part is None else (told.get(key) or {}).get(part)
            if value is not None:
                self._set(f"step_{name}", value, place)

    def _moved(self, place: WorkerPlace, moved: Moved) -> None:
        self._counts["moves", _labels(place, how=moved.how)] += 1
        if moved.how in ("kv", "tokens"):
            self._counts["move_bytes", _labels(place)] += moved.num_bytes
            self._counts["move_recomputed_tokens", _labels(place)] += moved.num_recomputed
            self._pauses[_labels(place, how=moved.how)].add(moved.pause_seconds)

    def _set(self, name: str, value: float, place: WorkerPlace, **labels: str) -> None:
        self._gauges[name, _labels(place, **labels)] = value

    # --- export ------------------------------------------------------------------------------------------------------

    def metrics(self) -> Iterator[Metric]:
        records = [(place, kind.__name__.lower(), each) for (place, kind), each in list(self._records.items())]
        published: list[tuple[Labels, float]] = []
        taken: list[tuple[Labels, float]] = []
        ended: list[tuple[Labels, float | Times]] = []  # includes zeros, so that the first dead letter is a rise
        for place, kind, each in records:
            published.append((_labels(place, type=kind, there="false"), each.published))
            published.append((_labels(place, type=kind, there="true"), each.there))
            taken.append((_labels(place, type=kind), each.taken))
            if each.taken or any(each.ended.values()):
                ended += [(_labels(place, type=kind, how=how), count) for how, count in each.ended.items()]
        yield Metric("records_published", "Records published", "counter", _there(published))
        yield Metric("records_taken", "Records pulled", "counter", _there(taken))
        yield Metric("records_ended", "Deliveries that were ended", "counter", ended)
        for name, what in _TIMES_OF_RECORDS.items():
            times = [(_labels(place, type=kind), getattr(each, name)) for place, kind, each in records]
            yield Metric(f"{name}_seconds", what, "times", [(labels, of) for labels, of in times if any(of.counts)])
        yield Metric("work_seconds", "Seconds of one piece of work", "times", list(self._work.items()))
        pauses: list[tuple[Labels, float | Times]] = [*self._pauses.items()]
        yield Metric("move_pause_seconds", "Seconds for which a moving sample was paused", "times", pauses)
        weights: list[tuple[Labels, float | Times]] = [*self._weights.items()]
        yield Metric("weights_seconds", "Seconds until a version of weights arrived, by way", "times", weights)
        yield from _by_name(self._gauges, "gauge")
        yield from _by_name(self._counts, "counter")
        yield from _by_name({key: count() for key, count in list(self._elsewhere.items())}, "counter")


# Field of steps.jsonl, and its part.
_OF_A_STEP = {
    "reward": ("reward", "mean"),
    "kl": ("kl", "k3"),
    "policy_loss": ("policy_loss", None),
    "entropy": ("entropy", None),
    "response_length": ("response_length", "mean"),
}
_TIMES_OF_RECORDS = {
    "publish": "Seconds until a record was durably published",
    "queue": "Seconds from when a record was published to when it was taken",
    "trip": "Seconds from when a record was published to when it was acknowledged",
}


def kind_of_work(what: str) -> str:
    """Return the kind of work without ids and numbers, as a metric label.

    >>> kind_of_work("loading weights version 7"), kind_of_work("scoring sums/3/7/1")
    ('loading weights version', 'scoring')
    >>> kind_of_work("12 samples, the first sums/3/7/1")
    'samples'
    """
    words = [word for word in what.partition(",")[0].split() if not re.search(r"[\d/]", word)]
    return " ".join(words) or "work"


def _labels(place: WorkerPlace, **more: str) -> Labels:
    return tuple(sorted({"stage": place.stage, "worker": str(place.worker), **more}.items()))


def _there(values: list[tuple[Labels, float]]) -> list[tuple[Labels, float | Times]]:
    return [(labels, value) for labels, value in values if value]


def _by_name(values: Mapping[tuple[str, Labels], float], kind: Literal["counter", "gauge"]) -> Iterator[Metric]:
    by_name: dict[str, list[tuple[Labels, float | Times]]] = {}
    for (name, labels), value in list(values.items()):
        by_name.setdefault(name, []).append((labels, value))
    for name, found in by_name.items():
        yield Metric(name, name.replace("_", " ").capitalize(), kind, found)
