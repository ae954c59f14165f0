"""Export of spans by OTLP over gRPC. OTEL_EXPORTER_OTLP_* variables set headers and certificates.

A span of a received record is preceded by a span `queue` for its wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Self

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rlhfspec.telemetry.spans import Attribute, Span, span_id

MOST_WAITING = 1 << 16  # spans; the training of all samples of a step ends at once
EXPORT_MILLISECONDS = 1000.0
EXPORT_TIMEOUT_SECONDS = 5.0
CLOSE_SECONDS = 5.0
log = logging.getLogger("rlhfspec.telemetry")


class OtlpSpans:
    """Span exporter of one process. Without a collector, spans are lost, but nothing waits."""

    def __init__(self, endpoint: str, resource: Mapping[str, Attribute]) -> None:
        self._endpoint = endpoint
        self._resource = dict(resource)
        self._of_stages: dict[str, Resource] = {}
        insecure = not endpoint.startswith("https://")
        self._exporter = OTLPSpanExporter(endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_SECONDS)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=MOST_WAITING, schedule_delay_millis=EXPORT_MILLISECONDS
        )

    def keep(self, span: Span) -> None:
        if span.again or span.is_open:
            return  # exported by the first worker, or at its end
        if span.sent is not None:
            self._processor.on_end(self._readable(span, "queue", span.sent, span.began))
        self._processor.on_end(self._readable(span, span.name, span.began, span.ended))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Unsent spans must not delay the exit while the collector is away.
        sending = threading.Thread(target=self._processor.shutdown, name="otlp-close", daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)
        if sending.is_alive():
            log.warning("%s did not accept the last spans in time", self._endpoint)
            self._exporter.shutdown()
            sending.join(CLOSE_SECONDS)

    def _readable(self, span: Span, name: str, began: float, ended: float) -> ReadableSpan:
        is_wait = name == "queue"
        id = span_id(span.trace, f"queue of {span.what}") if is_wait else span.id
        attributes: dict[str, Attribute] = {
            "rlhfspec.sample": span.sample,
            "rlhfspec.step": span.step,
            "rlhfspec.worker": span.worker,
        }
        if span.name in ("generation", "move"):
            attributes |= {"rlhfspec.delivery": span.delivery, "rlhfspec.stay": span.stay}
        if not is_wait:
            attributes |= {f"rlhfspec.{key}": value for key, value in span.attributes.items()}
        error = "" if is_wait else str(span.attributes.get("error", ""))
        return ReadableSpan(
            name=f"queue of {span.name}" if is_wait else name,
            context=_context(span.trace, id),
            parent=_context(span.trace, span.parent) if span.parent else None,
            resource=self._resource_of(span.stage),
            attributes=attributes,
            kind=SpanKind.PRODUCER if name == "prompt" else SpanKind.CONSUMER,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=int(began * 1e9),
            end_time=int(max(ended, began) * 1e9),
        )

    def _resource_of(self, stage: str) -> Resource:
        if stage not in self._of_stages:
            self._of_stages[stage] = Resource.create({**self._resource, "service.name": f"rlhfspec-{stage}"})
        return self._of_stages[stage]


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
