"""Rewards over HTTP from a real server that answers, fails, hangs, trickles and lies."""

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from reward_desks import Desk, run, sample

from rlhfspec.errors import InvalidRequest, RewardError
from rlhfspec.messages.records import Sample, Score
from rlhfspec.training.scoring.rewards.attempts import delay_seconds

Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Handler that follows the server's script; the last entry repeats."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append((self.body, dict(self.headers)))
            script = self.server.script
            behave = script[min(len(self.server.requests), len(script)) - 1]
        behave(self)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.script: list[Behaviour] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up, which tests do on purpose."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def reply(body: str | bytes, status: int = 200, **headers: str) -> Behaviour:
    content = body.encode() if isinstance(body, str) else body

    def behave(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return behave


def hang(handler: Handler) -> None:
    handler.server.over.wait()


def trickle(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000000")
    handler.end_headers()
    while not handler.server.over.wait(0.01):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def cut_short(handler: Handler) -> None:
    reply('{"reward": 1}', content_length="100")(handler)
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def score(url: str | Server, *samples: Sample, naps: list[float] | None = None, **source: Any) -> list[Score]:
    if isinstance(url, Server):
        url = f"http://127.0.0.1:{url.server_port}/score"
    desk = Desk(Path())
    desk.naps.seconds = [] if naps is None else naps
    given = {"type": "http", "url": url, "name": "judge", "timeoutSeconds": 30.0, "retries": 2, **source}
    try:
        return run(desk.sources(given), list(samples) or None)
    finally:
        assert naps is not None or not desk.naps.seconds, "a retry that was not expected"


def test_the_endpoint_gets_the_sample_and_its_number_is_the_reward(server: Server) -> None:
    server.script = [reply('{"reward": 0.25, "why": "close"}')]
    half_an_emoji = "4 \ud83d"  # as byte-level models may end
    (scored,) = score(server, sample(text=half_an_emoji), headers={"Authorization": "Bearer abc"})
    assert scored.values == (0.25,)
    body, headers = server.requests[0]
    of_prompt = {"id": "sums/1/0/0", "prompt": "2+2=", "columns": {"answer": "4"}}
    assert body == of_prompt | {"completion": half_an_emoji, "finish_reason": "stop"}
    assert headers["authorization"] == "Bearer abc"
    assert headers["content-type"] == "application/json"


def test_replies_reach_their_samples_in_any_order(server: Server) -> None:
    second_is_back = threading.Event()

    def first_comes_last(handler: Handler) -> None:
        replica = int(handler.body["id"].rpartition("/")[2])
        assert replica == 1 or second_is_back.wait(10)
        reply(json.dumps({"reward": replica}))(handler)
        second_is_back.set()

    server.script = [first_comes_last]
    scores = score(server, sample(replica=0), sample(replica=1), concurrency=2)
    assert [scored.values for scored in scores] == [(0.0,), (1.0,)]


@pytest.mark.parametrize("status", [500, 503, 408, 425, 429])
def test_a_temporary_failure_is_tried_again(server: Server, status: int) -> None:
    server.script = [reply("wait", status), reply("wait", status), reply('{"reward": 1}')]
    naps: list[float] = []
    assert score(server, naps=naps)[0].values == (1.0,)
    assert naps == [delay_seconds("judge", "sums/1/0/0", 1), delay_seconds("judge", "sums/1/0/0", 2)]


@pytest.mark.parametrize(
    ("answer", "problem", "num_calls"),
    [
        *(
            (reply("no such thing", status), rf"the endpoint answered {status} .*no s", 1)
            for status in (301, 400, 401, 404, 422)
        ),
        (reply("", 503, retry_after="3600"), "the endpoint answered 503 .*it asks to wait 3600 s, more than 60 s", 1),
        (reply('{"reward": 1}', content_encoding="gzip"), "the reply cannot be decoded: ", 1),
        (reply("busy", 503), r"the endpoint answered 503 Service Unavailable: 'busy' \(3 calls\)", 3),
        (cut_short, "the connection failed: peer closed connection", 3),
    ],
)
def test_permanent_and_last_failures_end_a_job(server: Server, answer: Behaviour, problem: str, num_calls: int) -> None:
    server.script, naps = [answer], list[float]()
    with pytest.raises(RewardError, match=f"^reward 'judge' of sample sums/1/0/0: {problem}"):
        score(server, naps=naps)
    assert (len(server.requests), len(naps)) == (num_calls, num_calls - 1)


def test_the_retry_after_header_sets_the_delay(server: Server) -> None:
    server.script = [reply("", 429, retry_after="7"), reply('{"reward": 1}')]
    naps: list[float] = []
    score(server, naps=naps)
    assert naps == [7.0]


@pytest.mark.parametrize("behave", [hang, trickle], ids=["hangs", "trickles"])
def test_a_slow_server_meets_the_deadline_of_the_call(server: Server, behave: Behaviour) -> None:
    server.script = [behave]
    with pytest.raises(RewardError, match=r"it gave no answer within 0.2 s \(2 calls\)"):
        score(server, naps=[], timeoutSeconds=0.2, retries=1)


def test_a_server_that_recovers_from_hanging_gives_the_reward(server: Server) -> None:
    server.script = [hang, hang_up, reply('{"reward": 1}')]
    assert score(server, naps=[], timeoutSeconds=2.0)[0].values == (1.0,)


def test_a_missing_server_is_an_error_after_the_retries() -> None:
    with Server() as gone:
        url = f"http://127.0.0.1:{gone.server_port}/"
    with pytest.raises(RewardError, match=r"the connection failed: .* \(2 calls\)"):
        score(url, naps=[], retries=1)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"reward": NaN}', 'the reply\'s "reward" is nan, not a finite number'),
        ('{"reward": 1e999}', 'the reply\'s "reward" is inf, not a finite number'),
        ('{"reward": null}', 'the reply\'s "reward" is None, not a number'),
        ('{"reward": "1"}', "'1' (str), not a number"),
        ('{"reward": [1]}', "a list of length 1, not a number"),
        ('{"rewards": [1]}', 'the reply has no "reward"'),
        ("[1]", 'the reply has no "reward"'),
        ("0.5", 'the reply has no "reward"'),
        ("", "the reply is not JSON: ''"),
        ("<html>" + "x" * 1000, "the reply is not JSON: '<html>xxx"),
        (b"\xff\xfe\x00", "the reply is not JSON"),
        ("[" * 100_000, "the reply is not JSON"),
        (b" " * (1 << 20) + b" ", "the reply is longer than 1048576 bytes"),
    ],
)
def test_a_malformed_reply_ends_the_job(server: Server, body: str | bytes, problem: str) -> None:
    server.script = [reply(body)]
    with pytest.raises(RewardError) as error:
        score(server)
    assert problem in error.value.problem
    assert len(str(error.value)) < 300


def test_a_dropped_sample_leaves_the_others(server: Server) -> None:
    def only_the_second(handler: Handler) -> None:
        (reply('{"reward": 1}') if handler.body["id"].endswith("/1") else reply("bad", 400))(handler)

    server.script = [only_the_second]
    bad, good = score(server, sample(replica=0), sample(replica=1), onError="drop", concurrency=1)
    assert bad.values == ()
    assert "answered 400 Bad Request: 'bad'" in bad.error
    assert good.values == (1.0,)


def test_no_more_calls_at_a_time_than_asked_for(server: Server) -> None:
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2, timeout=60)

    def count(handler: Handler) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()
        with lock:
            running -= 1
        reply('{"reward": 1}')(handler)

    server.script = [count]
    score(server, *(sample(replica=replica) for replica in range(6)), concurrency=2)
    assert most == 2


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"url": "http://"}, "url"),
        ({"url": "http://host:port/"}, "url"),
        ({"headers": {"x y": "1"}}, "headers"),
        ({"headers": {"key": "line\nbreak"}}, "headers.key"),
        ({"headers": {"key": "hidden "}}, "headers.key"),
        ({"headers": {"key": "hidden\n"}}, "headers.key"),
        ({"url": "http://me:hid/den@host/"}, "url"),
        ({"url": "http://me:hidden@[/"}, "url"),
        ({"url": "http://me:hidden@/"}, "url"),
        ({"url": "http://me:hidden@host:port/?key=hidden#hidden"}, "url"),
    ],
)
def test_an_invalid_request_is_refused_at_the_start_without_its_secrets(source: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        score(source.pop("url", "http://127.0.0.1:9"), **source)
    assert error.value.field == f"spec.rewards.sources[0].{field}"
    assert "hid" not in str(error.value)


@pytest.mark.parametrize("body", ["no", "the key {} is unknown"], ids=["plain", "echo"])
def test_secrets_are_in_no_message(server: Server, body: str, caplog: pytest.LogCaptureFixture) -> None:
    secret = "hid" + "den"  # a traceback shows this line
    server.script = [reply(body.format(secret), 401)]
    url = f"http://me:{secret}@127.0.0.1:{server.server_port}/?key={secret}"
    with caplog.at_level("DEBUG"), pytest.raises(RewardError) as error:
        score(url, headers={"key": f"Bearer {secret}"}, name=None)
    assert secret not in caplog.text
    assert secret not in "".join(traceback.format_exception(error.value))


def test_variables_of_the_environment_are_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("JUDGE_KEY", "abc")
    server.script = [reply('{"reward": 1}')]
    score("${JUDGE}/score?a=1", headers={"Authorization": "Bearer ${JUDGE_KEY}"})
    assert server.requests[0][1]["authorization"] == "Bearer abc"


@pytest.mark.parametrize("source", [{"url": "http://${NO_SUCH}/"}, {"headers": {"key": "${NO_SUCH}"}}])
def test_a_variable_that_is_not_set_is_named(source: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the environment variable NO_SUCH is not set"):
        score(source.pop("url", "http://127.0.0.1:9"), **source)
