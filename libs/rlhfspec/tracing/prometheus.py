"""Metrics as text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rlhfspec.tracing.meters import Metric, Times


def text_of(metrics: Iterable[Metric]) -> str:
    registry = CollectorRegistry()
    registry.register(_Collected(list(metrics)))
    return generate_latest(registry).decode()


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        return map(_family, self._metrics)


def _family(metric: Metric) -> Family:
    names = list(dict.fromkeys(name for labels, _ in metric.values for name, _ in labels))
    name = f"rlhfspec_{metric.name}"
    if metric.kind == "times":
        times = HistogramMetricFamily(name, metric.what, labels=names)
        for labels, value in metric.values:
            assert isinstance(value, Times)
            times.add_metric([text for _, text in labels], value.cumulative, value.sum)
        return times
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(name, metric.what, labels=names)
    for labels, value in metric.values:
        assert not isinstance(value, Times)
        family.add_metric([text for _, text in labels], value)
    return family
