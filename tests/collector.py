"""An OpenTelemetry collector that keeps what it receives."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector:
    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # service name, span
        self.metrics: set[str] = set()
        self._changed = threading.Condition()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_there, timeout=60.0), (self.spans, self.metrics)

    def take_spans(self, request: Any) -> None:
        with self._changed:
            for of_resource in request.resource_spans:
                names = {each.key: each.value.string_value for each in of_resource.resource.attributes}
                for scope in of_resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
            self._changed.notify_all()

    def take_metrics(self, request: Any) -> None:
        with self._changed:
            for of_resource in request.resource_metrics:
                for scope in of_resource.scope_metrics:
                    self.metrics |= {metric.name for metric in scope.metrics}
            self._changed.notify_all()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(collector), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(None).wait()
