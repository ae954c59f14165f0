"""Health over gRPC and HTTP is prompt and true, and needs credentials."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlhfspec.messages.servers.credentials.certificates import channel_credentials, create_credentials
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.stage.vitals import Vitals
from rlhfspec.worker.health import Health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def health(clock: FakeClock) -> Iterator[Health]:
    with Health("reward", 0, Vitals(clock), metrics=lambda: "rlhfspec_things_total 3\n") as health:
        yield health


def asked(health: Health, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(health.http_address, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def status(health: Health, *, role: str = "reward", credentials: Path | None = None) -> int:
    address = health.grpc_address
    with (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, channel_credentials(credentials, role))
    ) as channel:
        return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60).status)


def test_readiness_goes_from_building_to_ready_to_draining(health: Health) -> None:
    assert (status(health), asked(health, "/readyz")) == (NOT_SERVING, (503, "reward 0 is being built\n"))
    assert asked(health, "/healthz") == (200, "ok\n"), "it lives, and is not to be restarted while it is built"
    health.ready()
    assert (status(health), asked(health, "/readyz")) == (SERVING, (200, "ok\n"))
    health.draining()
    assert (status(health), asked(health, "/readyz")) == (NOT_SERVING, (503, "reward 0 is draining\n"))


def test_work_past_its_deadline_is_not_ready_but_alive(clock: FakeClock) -> None:
    vitals = Vitals(clock)
    with Health("reward", 0, vitals) as health:
        health.ready()
        with vitals.worker("reward", 0).working("reward of sums/3/7/1", deadline_seconds=60.0):
            clock._now = 59.0
            assert status(health) == SERVING
            clock._now = 61.0
            assert status(health) == NOT_SERVING
            assert asked(health, "/readyz") == (503, "reward 0: reward of sums/3/7/1 takes 61 s, past its deadline\n")
            assert asked(health, "/healthz")[0] == 200
        assert status(health) == SERVING


def test_a_blocked_event_loop_is_neither_ready_nor_alive(clock: FakeClock) -> None:
    with Health("reward", 0, Vitals(clock), beat_seconds=0.0) as health:
        health.ready()
        code, why = asked(health, "/healthz")
        assert (code, why) == (503, "reward 0: the event loop has not answered for 0 s\n")
        assert asked(health, "/readyz") == (503, why)
        assert status(health) == NOT_SERVING


def test_a_beat_makes_the_worker_healthy_again(clock: FakeClock) -> None:
    with Health("reward", 0, Vitals(clock), beat_seconds=600.0) as health:
        health._last_beat -= 601.0
        assert asked(health, "/healthz")[0] == 503
        health.beat()
        assert asked(health, "/healthz")[0] == 200


def test_a_grpc_watch_reports_each_change_of_health(clock: FakeClock) -> None:
    vitals = Vitals(clock)
    with Health("reward", 0, vitals) as health, grpc.insecure_channel(health.grpc_address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watched).status == NOT_SERVING
        health.ready()
        assert next(watched).status == SERVING
        with vitals.worker("reward", 0).working("a long thing", deadline_seconds=1.0):
            clock._now = 2.0
            assert next(watched).status == NOT_SERVING, "nobody called anything: time passed"
        assert next(watched).status == SERVING


def test_the_endpoint_serves_metrics_and_404_for_unknown_paths(health: Health) -> None:
    assert asked(health, "/metrics") == (200, "rlhfspec_things_total 3\n")
    assert asked(health, "/secrets") == (404, "not found; use /healthz, /readyz or /metrics\n")


def test_other_grpc_handlers_can_be_added(clock: FakeClock) -> None:
    def echo(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield request[::-1]

    health = Health("trainer", 0, Vitals(clock))
    handler = grpc.unary_stream_rpc_method_handler(echo)
    health.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rlhf.Echo", {"Back": handler}),))
    with health, grpc.insecure_channel(health.grpc_address) as channel:
        assert list(channel.unary_stream("/rlhf.Echo/Back")(b"abc", timeout=60)) == [b"cba"]


def test_closing_leaves_no_port_and_no_thread(clock: FakeClock) -> None:
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    with Health("reward", 0, Vitals(clock)) as health:
        health.ready()
        assert status(health) == SERVING
        half = socket.create_connection(health.http_address.split(":"))  # type: ignore[arg-type]
        half.sendall(b"GET /heal")
    for address in (health.http_address, health.grpc_address):
        host, port = address.split(":")
        with pytest.raises(OSError), socket.create_connection((host, int(port)), timeout=5):  # noqa: PT011
            pass
    half.close()
    for thread in set(threading.enumerate()) - before:
        assert thread.daemon or not thread.is_alive() or thread.join(10.0) is None


def test_only_callers_with_credentials_of_the_run_are_served(tmp_path: Path, clock: FakeClock) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    create_credentials(ours, ["reward", "control"])
    create_credentials(theirs, ["control"])
    with Health("reward", 0, Vitals(clock), ours) as health:
        health.ready()
        assert status(health, role="control", credentials=ours) == SERVING
        (theirs / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())  # it trusts us; we do not trust it
        tries: list[Callable[[], object]] = [lambda: status(health)]
        tries += [lambda: status(health, role="control", credentials=theirs)]
        for refused in tries:
            with pytest.raises(grpc.RpcError) as error:
                refused()
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
