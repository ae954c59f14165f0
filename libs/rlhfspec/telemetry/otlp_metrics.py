"""Export of metrics by OTLP over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Self

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from rlhfspec.telemetry.meters import BOUNDS, Labels, Meters, Metric, Times
from rlhfspec.telemetry.spans import Attribute

EXPORT_SECONDS = 5.0
EXPORT_TIMEOUT_SECONDS = 5.0
_LAST_EXPORT_SECONDS = 5.0


class OtlpMetrics:
    """Metrics exporter of one process. Without a collector, data are lost, but nothing waits."""

    def __init__(self, meters: Meters, endpoint: str, resource: Mapping[str, Attribute]) -> None:
        self._meters = meters
        self._resource = Resource.create({"service.name": "rlhfspec", **resource})
        insecure = not endpoint.startswith("https://")
        self._exporter = OTLPMetricExporter(endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_SECONDS)
        self._began = time.time_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._export_on, name="otlp-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join(_LAST_EXPORT_SECONDS)
        self._exporter.shutdown(timeout_millis=0)

    def _export_on(self) -> None:
        while not self._closing.wait(EXPORT_SECONDS):
            self._exporter.export(self._data())
        self._exporter.export(self._data())

    def _data(self) -> export.MetricsData:
        now = time.time_ns()
        metrics = [self._metric(metric, now) for metric in self._meters.metrics() if metric.values]
        of_scope = export.ScopeMetrics(InstrumentationScope("rlhfspec"), metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [of_scope], "")])

    def _metric(self, metric: Metric, now: int) -> export.Metric:
        cumulative = export.AggregationTemporality.CUMULATIVE
        data: export.Sum | export.Gauge | export.Histogram
        if metric.kind == "times":
            data = export.Histogram([self._times(labels, of, now) for labels, of in metric.values], cumulative)
        else:
            points = [self._number(labels, value, now) for labels, value in metric.values]
            data = export.Gauge(points) if metric.kind == "gauge" else export.Sum(points, cumulative, True)
        unit = "s" if metric.kind == "times" else ""
        return export.Metric(f"rlhfspec_{metric.name}", metric.what, unit, data)

    def _number(self, labels: Labels, value: float | Times, now: int) -> export.NumberDataPoint:
        assert not isinstance(value, Times)
        return export.NumberDataPoint(dict(labels), self._began, now, value)

    def _times(self, labels: Labels, value: float | Times, now: int) -> export.HistogramDataPoint:
        assert isinstance(value, Times)
        counts = list(value.counts)
        nothing = float("nan")  # minimum and maximum are not recorded
        return export.HistogramDataPoint(
            dict(labels), self._began, now, sum(counts), value.sum, counts, BOUNDS, min=nothing, max=nothing
        )
