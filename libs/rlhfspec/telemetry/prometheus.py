"""Metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from rlhfspec.telemetry.meters import Metric, Times

LOOPBACK = "127.0.0.1"


def text_of(metrics: Iterable[Metric]) -> str:
    return generate_latest(_AskedRegistry(lambda: metrics)).decode()


@contextmanager
def served(metrics: Callable[[], Iterable[Metric]]) -> Iterator[str]:
    """Serve `/metrics` on a free loopback port and yield host:port."""
    server, thread = start_http_server(0, LOOPBACK, _AskedRegistry(metrics))
    try:
        yield f"{LOOPBACK}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _AskedRegistry(CollectorRegistry):
    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        return map(_family, self._metrics())


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
