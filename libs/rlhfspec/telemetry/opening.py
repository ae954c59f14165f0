"""Watchers of a process. opentelemetry is imported only if needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfspec.telemetry.base import Watcher, Watchers
from rlhfspec.telemetry.folder import SpanFiles
from rlhfspec.telemetry.spans import Attribute, Span
from rlhfspec.telemetry.tracer import Tracer

if TYPE_CHECKING:
    from rlhfspec.telemetry.meters import Meters


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Watchers of one process, None where disabled."""

    watcher: Watcher | None
    meters: Meters | None

    def metrics_text(self) -> str:
        if self.meters is None:
            return ""
        from rlhfspec.telemetry.prometheus import text_of

        return text_of(self.meters.metrics())


@contextmanager
def watching(
    job: str, uid: str, *, run: Path | None, otlp_endpoint: str | None = None, metrics: bool = False
) -> Iterator[Observation]:
    """Open the process's telemetry: traces in folder `run`, spans and metrics over OTLP, `metrics` for Prometheus."""
    keepers: list[Callable[[Span], None]] = []
    watchers: list[Watcher] = []
    meters = None
    resource: dict[str, Attribute] = {"rlhfspec.job": job, "rlhfspec.run": uid}
    with ExitStack() as closing:
        if run is not None:
            keepers.append(closing.enter_context(SpanFiles(run)).keep)
        if otlp_endpoint is not None:
            from rlhfspec.telemetry.otlp import OtlpSpans

            keepers.append(closing.enter_context(OtlpSpans(otlp_endpoint, resource)).keep)
        if keepers:
            watchers.append(Tracer(uid, keepers[0] if len(keepers) == 1 else _each(keepers)))
        if metrics or otlp_endpoint is not None:
            from rlhfspec.telemetry.meters import Meters

            meters = Meters()
            watchers.append(meters)
        if meters is not None and otlp_endpoint is not None:
            from rlhfspec.telemetry.otlp_metrics import OtlpMetrics

            closing.enter_context(OtlpMetrics(meters, otlp_endpoint, resource))
        one = watchers[0] if len(watchers) == 1 else Watchers(watchers)
        yield Observation(watcher=one if watchers else None, meters=meters)


def _each(keepers: list[Callable[[Span], None]]) -> Callable[[Span], None]:
    def keep(span: Span) -> None:
        for one in keepers:
            one(span)

    return keep
