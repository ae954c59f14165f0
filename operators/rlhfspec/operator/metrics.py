"""Prometheus metrics of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Restarted(NamedTuple):
    """Number of restarts of a job's worker since its run began."""

    namespace: str
    job: str
    role: str
    worker: int
    restarts: int


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "rlhfspec_operator_reconcile_seconds",
            "Duration of one reconcile of one job, writes included.",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.decide_seconds = Histogram(
            "rlhfspec_operator_decide_cpu_seconds",
            "CPU time of one decision, which is a reconcile without its writes.",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.waited_seconds = Histogram(
            "rlhfspec_operator_queue_seconds",
            "Time that a due job waited for its reconcile.",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.failed = Counter("rlhfspec_operator_reconcile_failures", "Reconciles that failed.", registry=self.registry)
        self._unfinished = Counter(
            "rlhfspec_operator_leftovers_failures",
            "Failed passes over the resources of runs in NATS or Redis.",
            ["server"],
            registry=self.registry,
        )
        for server in ("NATS", "Redis"):
            self._unfinished.labels(server)
        self._writes = Counter(
            "rlhfspec_operator_api_writes", "Writes to the API server.", ["verb", "kind"], registry=self.registry
        )
        self._queue = Gauge("rlhfspec_operator_queue_length", "Jobs due for a reconcile.", registry=self.registry)
        self._jobs = Gauge("rlhfspec_operator_jobs", "Jobs known to the operator.", registry=self.registry)
        self._leader = Gauge("rlhfspec_operator_leader", "1 if this replica is the leader.", registry=self.registry)

    def wrote(self, verb: str, kind: str) -> None:
        self._writes.labels(verb, kind).inc()

    def unfinished(self, server: str) -> None:
        self._unfinished.labels(server).inc()

    def show(
        self,
        *,
        queue: Callable[[], float],
        jobs: Callable[[], float],
        leader: Callable[[], float],
        restarts: Callable[[], Iterable[Restarted]],
        unwatched: Callable[[], Mapping[str, str]],
    ) -> None:
        """Register gauges whose functions are called at each scrape."""
        self._queue.set_function(queue)
        self._jobs.set_function(jobs)
        self._leader.set_function(leader)
        self.registry.register(_MadeWhenRead(lambda: _restarts(restarts())))
        self.registry.register(_MadeWhenRead(lambda: _unwatched(unwatched())))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _MadeWhenRead(Collector):
    def __init__(self, family: Callable[[], Metric]) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family()


def _restarts(workers: Iterable[Restarted]) -> Metric:
    """Return restart counters under the name that the local supervisor uses."""
    labels = ("namespace", "rlhfjob", "stage", "worker")
    family = CounterMetricFamily("rlhfspec_restarts", "Restarts of a worker.", labels=labels)
    for each in workers:
        family.add_metric((each.namespace, each.job, each.role, str(each.worker)), each.restarts)
    return family


def _unwatched(problems: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(
        "rlhfspec_operator_namespace_unwatched",
        "1 if jobs of this namespace (empty: all namespaces) cannot be watched; see the log.",
        labels=("job_namespace",),
    )
    for namespace, problem in problems.items():
        family.add_metric((namespace,), float(bool(problem)))
    return family
