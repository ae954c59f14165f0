"""Queries on a run's traces: a sample's life, and the slowest samples of a step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.errors import InvalidRequest
from rlhfspec.telemetry.folder import TRACES, read_spans
from rlhfspec.telemetry.joining import joined
from rlhfspec.telemetry.spans import Span

_LAST = ("training", "evaluation")
HOW_TO_GET_TRACES = "are written while a job runs, with observability.traces: true"


@dataclass(frozen=True, slots=True)
class Life:
    """Spans of one sample in one run, ordered by begin, with the end of its step last."""

    sample: str
    spans: tuple[Span, ...]

    @property
    def began(self) -> float:
        return min(span.began for span in self.spans)

    @property
    def ended(self) -> float:
        return max(span.ended for span in self.spans)

    @property
    def seconds_until_scored(self) -> float:
        """Return the seconds until the last score, after which the sample only waits for its step."""
        return max((span.ended for span in self.spans if span.name not in _LAST), default=self.ended) - self.began

    @property
    def stays(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.name == "generation")

    @property
    def moves(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.name == "move")

    @property
    def queue_seconds(self) -> float:
        return sum(span.waited_seconds for span in self.spans if span.name not in _LAST)

    @property
    def is_generated(self) -> bool:
        return any(span.name not in ("prompt", "generation", "move") for span in self.spans)

    def is_in_vain(self, span: Span) -> bool:
        """Return whether the stay's result was lost and its prompt redelivered."""
        return span.name == "generation" and span.delivery != self._delivery

    @property
    def _delivery(self) -> int:
        finished = (span for span in self.stays if "finish_reason" in span.attributes and not span.again)
        return next(finished, self.stays[-1]).delivery


def life_of(run: Path, sample: str) -> Life:
    """Return a sample's life, or raise InvalidRequest with the nearest ids. The job's name may be omitted."""
    _refuse_without_traces(run)
    spans = list(read_spans(run, containing=f'{sample}"'))
    names = {span.sample for span in spans if span.sample == sample} or {
        span.sample for span in spans if span.sample.endswith(f"/{sample}")
    }
    if len(names) != 1:
        raise InvalidRequest("SAMPLE", sample, _unknown(sample, {span.sample for span in read_spans(run)}))
    [name] = names
    return lives([span for span in spans if span.sample == name])[0]


def slowest(run: Path, count: int, *, step: int | None = None) -> list[Life]:
    """Return the lives of a step (None: the last trained step), longest first."""
    _refuse_without_traces(run)
    if step is None:
        trained = (span.step for span in read_spans(run, containing='"training"') if span.name == "training")
        step = max(trained, default=1)
    spans = [span for span in read_spans(run, containing=f'"step":{step},') if not is_evaluation(span)]
    if not spans:
        raise InvalidRequest("--step", step, "there are no traces of this step")
    return sorted(lives(spans), key=lambda life: (-life.seconds_until_scored, life.sample))[:count]


def lives(spans: Iterable[Span]) -> list[Life]:
    """Return each sample's life in its last run, with only the first result of repeated work."""
    by_sample: dict[str, list[Span]] = {}
    for span in spans:
        by_sample.setdefault(span.sample, []).append(span)
    return [Life(sample, _as_it_counted(of_one)) for sample, of_one in by_sample.items()]


def is_evaluation(span: Span) -> bool:
    return "/evaluation-" in span.sample


def _as_it_counted(spans: list[Span]) -> tuple[Span, ...]:
    last_run = max(spans, key=lambda span: span.ended).run
    of_last = [span for span in spans if span.run == last_run]
    first: dict[str, Span] = {}
    for span in sorted(of_last, key=lambda span: (span.is_open, span.again, span.ended)):
        first.setdefault(span.what, span)
    counted = joined(list(first.values()))
    return tuple(sorted(counted, key=lambda span: (span.name in _LAST, span.began, span.ended)))


def _refuse_without_traces(run: Path) -> None:
    if not run.is_dir():
        raise InvalidRequest("RUN", str(run), "no run is there")
    if not any((run / TRACES).glob("*.jsonl")):
        raise InvalidRequest("RUN", str(run), f"it holds no traces: they {HOW_TO_GET_TRACES}")


def _unknown(sample: str, known: set[str]) -> str:
    prefix = sample.rpartition("/")[0]
    beside = {name for name in known if prefix and name.rpartition("/")[0].endswith(prefix)}
    near = sorted(beside, key=_in_order)[:3] or difflib.get_close_matches(sample, sorted(known)[:5000], n=3, cutoff=0.0)
    return f"no trace of it; the nearest: {', '.join(near)}" if near else "no trace of it, nor of any other sample"


def _in_order(id: str) -> list[tuple[int, str]]:
    return [(int(part), "") if re.fullmatch(r"\d+", part) else (-1, part) for part in id.split("/")]
