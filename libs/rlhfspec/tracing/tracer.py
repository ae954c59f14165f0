"""Makes a sample's spans out of what passes on the bus: prompt -> generation -> each score, and training.

The prompt's span is the first; generation hangs on it, scores and training hang on the generation.

Example:
    >>> spans: list[Span] = []
    >>> tracer = Tracer("3f2a91c0", spans.append, now=lambda: 100.0)
    >>> tracer.publishing(Place("generator", 0), example_sample())["traceparent"][:9]
    '00-3dcb19'
    >>> tracer.published(Place("generator", 0), example_sample(), 99.0, True)
    >>> spans[0].name, spans[0].attributes["strategies"]
    ('generation', 'suffix x 3')
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhfspec.records import EvaluationReport, Prompt, Record, Sample, Score, StepReport, Weights
from rlhfspec.tracing.base import SENT, How, Place, sent_at
from rlhfspec.tracing.spans import TRACEPARENT, Attribute, Span, parse, span_id, trace_id, traceparent

_LEADS_ON = (Prompt, Sample)  # what is made of it goes on in the same trace


class _Taken(NamedTuple):
    """A record that this process has in hand: since when, and of which span it came."""

    at: float
    sent: float | None
    parent: str


@dataclass(slots=True)
class _Arrived:
    """A sample at the trainer."""

    place: Place
    taken: _Taken
    scored: float


@dataclass(slots=True)
class _Step:
    """What the trainer has of a step (or of an evaluation)."""

    samples: dict[str, _Arrived] = field(default_factory=dict)
    complete: float = 0.0  # when the last record of it came
    trained: float = 0.0


class Tracer:
    """A `Watcher`. `keep` is given every span once it is over."""

    def __init__(self, uid: str, keep: Callable[[Span], None], *, now: Callable[[], float] = time.time) -> None:
        self._uid = uid
        self._keep = keep
        self._now = now
        self._taken: dict[tuple[Place, str], _Taken] = {}
        self._steps: dict[tuple[str, int], _Step] = {}  # by purpose

    def publishing(self, place: Place, record: Record) -> Mapping[str, str]:
        sent = f"{self._now():.6f}"
        if not isinstance(record, _LEADS_ON):
            return {SENT: sent}
        trace = trace_id(self._uid, record.id)
        return {SENT: sent, TRACEPARENT: traceparent(trace, span_id(trace, _name_of(record)))}

    def published(self, place: Place, record: Record, began: float, is_new: bool) -> None:
        if isinstance(record, Prompt):
            self._keep(self._span(place, record, None, began, is_new, {}))
        elif isinstance(record, Sample):
            taken = self._taken.get((place, record.id))
            self._keep(self._span(place, record, taken, began, is_new, _of_a_generation(record)))
        elif isinstance(record, Score):
            taken = self._taken.get((place, record.sample_id))
            self._keep(self._span(place, record, taken, began, is_new, _of_a_score(record)))
        elif isinstance(record, Weights) and record.role == "policy":
            if (step := self._steps.get(("training", record.version))) is not None:
                step.trained = self._now()
        elif isinstance(record, StepReport):
            self._end_step("training", record)
        elif isinstance(record, EvaluationReport):
            self._end_step("evaluation", record)

    def taken(self, place: Place, record: Record, headers: Mapping[str, str]) -> None:
        if isinstance(record, Score):
            self._scored(record)
        elif isinstance(record, _LEADS_ON):
            context = parse(headers.get(TRACEPARENT, ""))
            taken = _Taken(self._now(), sent_at(headers), context[1] if context else "")
            if place.stage == "trainer" and isinstance(record, Sample):
                self._arrived(place, record, taken)
            else:  # of what comes again while it is held, the first time counts
                self._taken.setdefault((place, record.id), taken)

    def ended(self, place: Place, record_type: type, id: str, how: How) -> None:
        self._taken.pop((place, id), None)

    def _span(
        self,
        place: Place,
        record: Prompt | Sample | Score,
        taken: _Taken | None,
        began: float,
        is_new: bool,
        attributes: Mapping[str, Attribute],
    ) -> Span:
        sample = _sample_of(record)
        return Span(
            run=self._uid,
            parent=taken.parent if taken else "",
            name=_name_of(record),
            stage=place.stage,
            worker=place.worker,
            sample=sample,
            step=record.step,
            began=taken.at if taken else began,
            ended=self._now(),
            sent=taken.sent if taken else None,
            again=not is_new,
            attributes=attributes,
        )

    def _arrived(self, place: Place, sample: Sample, taken: _Taken) -> None:
        step = self._steps.setdefault((sample.purpose, sample.step), _Step())
        step.complete = taken.at
        step.samples.setdefault(sample.id, _Arrived(place, taken, taken.at))

    def _scored(self, score: Score) -> None:
        step = self._steps.setdefault((score.purpose, score.step), _Step())
        step.complete = self._now()
        if (arrived := step.samples.get(score.sample_id)) is not None:
            arrived.scored = step.complete

    def _end_step(self, purpose: str, report: StepReport | EvaluationReport) -> None:
        """The spans of its samples; what is held of earlier steps came again and is of no use."""
        step = self._steps.get((purpose, report.step), _Step())
        for key in [key for key in self._steps if key[0] == purpose and key[1] <= report.step]:
            del self._steps[key]
        ended = step.trained or self._now()
        attributes: dict[str, Attribute] = {"complete": round(step.complete, 6)}
        if num_dropped := json.loads(report.metrics_json).get("num_dropped"):
            attributes["dropped"] = num_dropped  # which ones is not known here
        name = "training" if purpose == "training" else "evaluation"
        for sample, arrived in step.samples.items():
            self._keep(
                Span(
                    run=self._uid,
                    parent=arrived.taken.parent,
                    name=name,
                    stage=arrived.place.stage,
                    worker=arrived.place.worker,
                    sample=sample,
                    step=report.step,
                    began=arrived.taken.at,
                    ended=ended,
                    sent=arrived.taken.sent,
                    attributes={**attributes, "scored": round(arrived.scored, 6)},
                )
            )


def _sample_of(record: Prompt | Sample | Score) -> str:
    return record.sample_id if isinstance(record, Score) else record.id


def _name_of(record: Prompt | Sample | Score) -> str:
    if isinstance(record, Score):
        return record.stage
    return "prompt" if isinstance(record, Prompt) else "generation"


def _of_a_generation(sample: Sample) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "generator": sample.generator,
        "tokens": len(sample.token_ids),
        "strategies": ", ".join(f"{name} x {steps}" for name, steps in sample.strategies),
        "engine_steps": sum(steps for _, steps in sample.strategies),
        "verifications": sample.num_verifications,
        "drafted": sample.num_drafted,
        "accepted": sample.num_accepted,
        "weights_versions": ", ".join(map(str, sorted(set(sample.weights_versions)))),
        "finish_reason": sample.finish_reason,
        "work_seconds": round(sample.seconds, 6),
    }
    return attributes | ({"error": sample.error} if sample.error else {})


def _of_a_score(score: Score) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {"work_seconds": round(score.seconds, 6)}
    if score.error:
        attributes["error"] = score.error
    elif score.stage == "reward":
        attributes["reward"] = score.values[0]
    return attributes


def example_sample() -> Sample:
    """For examples and tests."""
    return Sample(
        id="sums/3/7/1", job="sums", step=3, prompt=7, replica=1, prompt_text="2+2=", prompt_token_ids=(1, 2),
        columns_json="{}", text="4", token_ids=(3, 4, 5), log_probs=(-0.5,) * 3, tempered_log_probs=(-0.5,) * 3,
        weights_versions=(2,) * 3, finish_reason="stop", num_verifications=3, num_drafted=4, num_accepted=2,
        strategies=(("suffix", 3),), seconds=0.5, generator="generator-0",
    )  # fmt: skip
