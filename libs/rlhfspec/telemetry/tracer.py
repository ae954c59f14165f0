"""Tracer that makes a sample's spans from bus traffic: prompt -> generation -> each score, and training.

If a sample moves, the parent of each stay and move is the previous stay. Long stays are also reported early, because
their generator may be killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rlhfspec.messages.records import EvaluationReport, Load, Moved, Prompt, Record, Sample, Score, StepReport, Weights
from rlhfspec.telemetry.base import SENT, Delivered, How, SampleProgress, WorkerPlace, sent_at
from rlhfspec.telemetry.spans import TRACEPARENT, Attribute, Span, parse, span_id, trace_id, traceparent, what_was_done
from rlhfspec.telemetry.stays import made_at_the_last, made_before_it_left, of_a_move

OPEN_SECONDS = 1.0  # shorter stays are reported once
_LEADS_ON = (Prompt, Sample)  # their results belong to the same trace


@dataclass(slots=True)
class _Taken:
    """Record being processed, with its time and parent span."""

    at: float
    step: int
    sent: float | None = None
    parent: str = ""
    delivery: int = 1
    stay: int = 1
    progress: SampleProgress | None = None
    is_told: bool = False


@dataclass(slots=True)
class _Arrived:
    place: WorkerPlace
    taken: _Taken
    scored: float


@dataclass(slots=True)
class _TracedStep:
    samples: dict[str, _Arrived] = field(default_factory=dict)
    complete: float = 0.0  # time of its last record
    trained: float = 0.0


class Tracer:
    """Watcher that makes spans. `keep` receives every span at its end."""

    def __init__(self, uid: str, keep: Callable[[Span], None], *, now: Callable[[], float] = time.time) -> None:
        self._uid = uid
        self._keep = keep
        self._now = now
        self._taken: dict[tuple[WorkerPlace, str], _Taken] = {}
        self._left: dict[tuple[WorkerPlace, str], Span] = {}  # stays that ended by a move of unknown outcome
        self._steps: dict[tuple[str, int], _TracedStep] = {}  # by purpose and step

    def publishing(self, place: WorkerPlace, record: Record) -> Mapping[str, str]:
        sent = f"{self._now():.6f}"
        if not isinstance(record, _LEADS_ON):
            return {SENT: sent}
        trace, what = trace_id(self._uid, record.id), "prompt"
        if isinstance(record, Sample):
            taken = self._taken.get((place, record.id))
            what = what_was_done("generation", taken.delivery, taken.stay) if taken else "generation"
        return {SENT: sent, TRACEPARENT: traceparent(trace, span_id(trace, what))}

    def published(self, place: WorkerPlace, record: Record, began: float, is_new: bool) -> None:
        if isinstance(record, Prompt):
            self._keep(self._span("prompt", place, record.id, _Taken(began, record.step), {}, again=not is_new))
        elif isinstance(record, Sample):
            taken = self._taken.get((place, record.id)) or _Taken(began, record.step)
            made = made_at_the_last(record, taken.progress)
            self._keep(self._stay(place, record.id, taken, made, again=not is_new))
        elif isinstance(record, Score):
            taken = self._taken.get((place, record.sample_id)) or _Taken(began, record.step)
            score = _of_a_score(record)
            self._keep(self._span(record.stage, place, record.sample_id, taken, score, again=not is_new))
        elif isinstance(record, Load):
            self._tell_open(place)
        elif isinstance(record, Moved):
            self._moved(place, record, began)
        elif isinstance(record, Weights) and record.role == "policy":
            if (step := self._steps.get(("training", record.version))) is not None:
                step.trained = self._now()
        elif isinstance(record, StepReport):
            self._end_step("training", record)
        elif isinstance(record, EvaluationReport):
            self._end_step("evaluation", record)

    def taken(self, place: WorkerPlace, record: Record, delivered: Delivered) -> None:
        if isinstance(record, Score):
            self._scored(record)
        elif isinstance(record, _LEADS_ON):
            taken = self._in_hand(record, delivered)
            if place.stage == "trainer" and isinstance(record, Sample):
                self._arrived(place, record, taken)
            else:  # of repeated deliveries the first counts
                self._taken.setdefault((place, record.id), taken)

    def ended(
        self, place: WorkerPlace, record_type: type, id: str, how: How, progress: SampleProgress | None = None
    ) -> None:
        taken = self._taken.pop((place, id), None)
        if taken is None or record_type is not Prompt:
            return
        if progress is not None:
            stay = self._stay(place, id, taken, made_before_it_left(place, taken.progress, progress))
            stay.ended = progress.at
            self._left[place, id] = stay
            self._keep(stay)
        elif how == "nak":
            self._keep(self._stay(place, id, taken, {"left": "handed back"}))

    def _in_hand(self, record: Prompt | Sample, delivered: Delivered) -> _Taken:
        context = parse(delivered.headers.get(TRACEPARENT, ""))
        taken = _Taken(self._now(), record.step, parent=context[1] if context else "", delivery=delivered.num)
        if delivered.progress is None:
            taken.sent = sent_at(delivered.headers)
        else:  # it was in no queue; its parent is the previous stay
            taken.progress, taken.stay = delivered.progress, delivered.progress.num_moves + 2
            before = what_was_done("generation", taken.delivery, taken.stay - 1)
            taken.parent = span_id(trace_id(self._uid, record.id), before)
        return taken

    def _span(
        self,
        name: str,
        place: WorkerPlace,
        sample: str,
        taken: _Taken,
        attributes: Mapping[str, Attribute],
        *,
        again: bool = False,
    ) -> Span:
        return Span(
            run=self._uid,
            parent=taken.parent,
            name=name,
            stage=place.stage,
            worker=place.worker,
            sample=sample,
            step=taken.step,
            began=taken.at,
            ended=self._now(),
            sent=taken.sent,
            again=again,
            attributes=attributes,
        )

    def _stay(
        self,
        place: WorkerPlace,
        sample: str,
        taken: _Taken,
        attributes: Mapping[str, Attribute],
        *,
        again: bool = False,
    ) -> Span:
        span = self._span("generation", place, sample, taken, attributes, again=again)
        span.delivery, span.stay = taken.delivery, taken.stay
        return span

    def _tell_open(self, place: WorkerPlace) -> None:
        now = self._now()
        for (where, sample), taken in self._taken.items():
            if where == place and not taken.is_told and now - taken.at >= OPEN_SECONDS:
                taken.is_told = True
                stay = self._stay(place, sample, taken, {"generator": f"{place.stage}-{place.worker}"})
                stay.is_open = True
                self._keep(stay)

    def _moved(self, place: WorkerPlace, moved: Moved, published: float) -> None:
        """Report the span of a move that paused its sample."""
        if moved.pause_seconds <= 0.0:
            return
        stay = self._left.pop((place, moved.sample_id), None)
        began = stay.ended if stay else published - moved.pause_seconds
        if stay is None and (taken := self._taken.get((place, moved.sample_id))) is not None:
            stay = self._stay(place, moved.sample_id, taken, {})
        if stay is not None:
            span = replace(stay, name="move", parent=stay.id, sent=None, attributes=of_a_move(moved))
            span.began, span.ended = began, began + moved.pause_seconds
            self._keep(span)

    def _arrived(self, place: WorkerPlace, sample: Sample, taken: _Taken) -> None:
        step = self._steps.setdefault((sample.purpose, sample.step), _TracedStep())
        step.complete = taken.at
        step.samples.setdefault(sample.id, _Arrived(place, taken, taken.at))

    def _scored(self, score: Score) -> None:
        step = self._steps.setdefault((score.purpose, score.step), _TracedStep())
        step.complete = self._now()
        if (arrived := step.samples.get(score.sample_id)) is not None:
            arrived.scored = step.complete

    def _end_step(self, purpose: str, report: StepReport | EvaluationReport) -> None:
        """Report the training or evaluation spans of a step's samples, and drop steps up to it."""
        step = self._steps.get((purpose, report.step), _TracedStep())
        for key in [key for key in self._steps if key[0] == purpose and key[1] <= report.step]:
            del self._steps[key]
        ended = step.trained or self._now()
        attributes: dict[str, Attribute] = {"complete": round(step.complete, 6)}
        if isinstance(report, StepReport) and report.metrics.num_dropped:
            attributes["dropped"] = report.metrics.num_dropped  # unknown which ones
        name = "training" if purpose == "training" else "evaluation"
        for sample, arrived in step.samples.items():
            scored: dict[str, Attribute] = {**attributes, "scored": round(arrived.scored, 6)}
            span = self._span(name, arrived.place, sample, arrived.taken, scored)
            span.ended = ended
            self._keep(span)


def _of_a_score(score: Score) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {"work_seconds": round(score.seconds, 6)}
    if score.error:
        attributes["error"] = score.error
    elif score.stage == "reward":
        attributes["reward"] = score.values[0]
    return attributes
