"""Reports over TLS with a rotating token, and with an absent operator."""

import asyncio
import logging
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_place import Operator
from shared_servers import SharedServers

from rlhfspec.cluster.report import Report
from rlhfspec.control.reporting import Endpoint, NotTaken, Reporter
from rlhfspec.errors import InvalidRequest
from rlhfspec.stage.vitals import Vitals


@pytest.fixture
def servers(tmp_path: Path) -> SharedServers:
    return SharedServers(tmp_path / "release")  # for its certificates: nothing is started


@pytest.fixture
def operator(servers: SharedServers) -> Iterator[Operator]:
    operator = Operator(servers)
    yield operator
    operator.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path / "token"


def authority(servers: SharedServers) -> Path:
    return servers.credentials("control") / "servers-ca.pem"


BODY = Report(run="c0e43711", step=3).model_dump_json().encode()


def test_a_report_is_sent_with_the_current_token(servers: SharedServers, operator: Operator, token: Path) -> None:
    endpoint = Endpoint(operator.url, authority(servers), token)
    endpoint.post(BODY)
    operator.token = "second"
    with pytest.raises(NotTaken, match="it answered 401 Unauthorized"):
        endpoint.post(BODY)
    token.write_text("second")
    endpoint.post(BODY)
    assert [report.step for report in operator.reports] == [3, 3]


def test_foreign_server_gets_no_token(servers: SharedServers, operator: Operator, token: Path, tmp_path: Path) -> None:
    stranger = SharedServers(tmp_path / "stranger")
    with pytest.raises(NotTaken, match="CERTIFICATE_VERIFY_FAILED"):
        Endpoint(operator.url, authority(stranger), token).post(BODY)
    assert not operator.reports
    assert not operator.problems, "it never came so far"


def test_missing_operator_token_or_tls_is_one_line(servers: SharedServers, operator: Operator, token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotTaken, match="Connection refused"):
        Endpoint(f"https://127.0.0.1:{port}/", authority(servers), token).post(BODY)
    token.unlink()
    with pytest.raises(NotTaken, match="No such file or directory"):
        Endpoint(operator.url, authority(servers), token).post(BODY)
    with pytest.raises(InvalidRequest, match="must be an https:// URL, because a token is sent to it"):
        Endpoint("http://operator:8443/", authority(servers), token)


async def test_an_absent_operator_is_logged_in_one_line(
    servers: SharedServers, operator: Operator, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, asked = Endpoint(operator.url, authority(servers), token), asyncio.Event()
    operator.answer = 503
    tries, loop = 0, asyncio.get_running_loop()

    def post(body: bytes) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            operator.answer = 200
        try:
            endpoint.post(body)
        finally:
            if tries == 3:
                loop.call_soon_threadsafe(asked.set)

    reporter = Reporter(Vitals(), lambda: Report(run="c0e43711", step=tries), post, random.Random(0))
    with caplog.at_level(logging.INFO, logger="rlhfspec"):
        running = asyncio.create_task(reporter.run())
        async with asyncio.timeout(60.0):
            await asked.wait()
        await reporter.stop()
        await running
        reporter.close()
    away = "the operator does not accept reports: it answered 503 Service Unavailable; the run continues without"
    assert [record.message for record in caplog.records] == [away, "the operator accepts reports again"]
    assert len(operator.reports) == 1
