"""Links to killed, stopped, slow or hostile ends raise LinkError by the deadline and leave nothing."""

import json
import os
import signal
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from faults.proxy import Proxy
from hypothesis import given, settings, strategies as st
from link_checks import DESTINATION, NIXL, SOURCE, nothing_left as nothing_left, other, shared_names, warm as warm
from sweeps import examples

from rlhfspec.errors import LinkError
from rlhfspec.messages.servers.credentials.certificates import client_tls, create_credentials, server_tls
from rlhfspec.moves.migration.links import frames, inbox
from rlhfspec.moves.migration.links.base import Sending
from rlhfspec.moves.migration.links.inbox import Landing
from rlhfspec.moves.migration.links.opening import make_landing, open_sending
from rlhfspec.moves.migration.links.torch_link import TorchSending
from rlhfspec.testing.link import pattern

pytestmark = pytest.mark.usefixtures("warm", "nothing_left")

BETWEEN_PROCESSES = ["shm", "tcp", "torch", *NIXL]
BY_SOCKET = ["shm", "tcp"]  # the others have their headers read as tcp has


class Ends(ExitStack):
    """Ends of links, closed after the test."""

    def landing(self, kind: str, **options: Any) -> Landing:
        return self.enter_context(closing(make_landing(kind, **options)))

    def sending(self, offer: str, **options: Any) -> Sending:
        return self.enter_context(closing(open_sending(offer, **options)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Ends() as ends:
        yield ends


@pytest.fixture(params=BETWEEN_PROCESSES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ranges_of_any_sizes_arrive_whole_from_another_process(ends: Ends, kind: str) -> None:
    landing = ends.landing(kind)
    counter = iter(range(1 << 30))
    with other(SOURCE) as source:
        source.say(landing.offer)
        assert source.hear() == "ready"

        @examples(8, whole=50)
        @given(st.lists(st.integers(0, 200_000) | st.sampled_from([0, 1, 4095, 4096, 65537]), min_size=1, max_size=5))
        def ranges(sizes: list[int]) -> None:
            move = next(counter)
            for number, size in enumerate(sizes):
                source.say(f"{move}/{number} {size} {move + number}")
            for number, size in enumerate(sizes):
                assert landing.take(f"{move}/{number}", size, timeout=120) == pattern(size, move + number)
                landing.done(f"{move}/{number}")
                assert source.hear() == f"sent {move}/{number}"

        ranges()


def test_ranges_from_a_killed_source_are_whole_or_missing(ends: Ends, kind: str) -> None:
    landing = ends.landing(kind)
    with other(SOURCE) as source:
        source.say(landing.offer)
        source.say("m/0 100000 3")
        view = landing.take("m/0", 100_000, timeout=120)
    assert view == pattern(100_000, 3)
    landing.done("m/0")
    with pytest.raises(LinkError, match="did not come"):
        landing.take("m/1", 1, timeout=0.01)
    assert landing.num_bytes == 0


def test_a_killed_destination_is_noticed(ends: Ends, kind: str) -> None:
    with other(DESTINATION, kind) as destination:
        sending = ends.sending(destination.hear(), seconds=2)
        send(sending, "m/0", pattern(1000))
        destination.say("m/0 1000")
        assert destination.hear() == str(sum(pattern(1000)))
        sending.room(1000)
    with pytest.raises(LinkError):
        sending.send("m/1", 1000)
    with pytest.raises(LinkError):
        sending.room(1000)


def test_a_destination_that_stands_still_is_given_up(ends: Ends, kind: str) -> None:
    with other(DESTINATION, kind) as destination:
        sending = ends.sending(destination.hear(), seconds=0.3)
        os.kill(destination.process.pid, signal.SIGSTOP)
        with pytest.raises(LinkError):  # noqa: PT012 sooner or later all room is taken
            for number in range(10):
                sending.room(30 << 20)
                sending.send(f"m/{number}", 30 << 20)


def test_connecting_to_a_closed_landing_fails(kind: str) -> None:
    landing = make_landing(kind)
    landing.close()
    with pytest.raises(LinkError, match="cannot connect"):
        open_sending(landing.offer, seconds=1)


@pytest.mark.parametrize("kind", ["shm", *NIXL])
def test_a_killed_end_of_a_link_leaves_no_shared_memory_file(kind: str) -> None:
    before = shared_names()
    with other(DESTINATION, kind) as destination, other(SOURCE) as source:
        source.say(destination.hear())
        source.say("m/0 100000 3")
        assert source.hear() == "ready"
        assert source.hear() == "sent m/0"
    assert shared_names() == before


def test_a_process_may_end_while_gloo_waits(ends: Ends) -> None:
    """Otherwise the interpreter aborts while a thread is inside gloo."""
    code = """
import sys
from rlhfspec.moves.migration.links.torch_link import TorchSending
from rlhfspec.moves.migration.links.opening import make_landing
landing = make_landing("torch", seconds=1)
print(landing.offer, flush=True)
sys.stdin.readline()
"""
    with other(code) as destination:
        sending = ends.sending(destination.hear(), seconds=5)
        assert isinstance(sending, TorchSending)
        sending._connection.sendall(header(size=1000))  # and none of its bytes
        destination.say("end")
        assert destination.process.wait(60) == 0


def connected(landing: Landing) -> socket.socket:
    (way,) = json.loads(landing.offer)["ways"]
    if way["kind"] != "shm":
        return socket.create_connection((way["host"], way["port"]))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{way['name']}")
    return connection


def let_in(landing: Landing) -> socket.socket:
    connection = connected(landing)
    frames.greet(connection, json.loads(landing.offer)["token"], timeout=10)
    return connection


def send(sending: Sending, key: str, content: bytes) -> None:
    sending.room(len(content))[:] = content
    sending.send(key, len(content))


def header(mark: bytes = b"KVRG", key: bytes = b"m/0", length: int | None = None, at: int = 0, size: int = 3) -> bytes:
    return struct.pack("!4sHIQ", mark, len(key) if length is None else length, at, size) + key


def assert_thrown_out(connection: socket.socket) -> None:
    connection.settimeout(30)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    connection.close()


def assert_works(landing: Landing, key: str) -> None:
    sending = open_sending(landing.offer)
    send(sending, key, b"abc")
    assert landing.take(key, 3, timeout=120) == b"abc"
    landing.done(key)
    sending.close()


@pytest.mark.parametrize("kind", BY_SOCKET)
@pytest.mark.parametrize(
    "said",
    [
        header(mark=b"HTTP"),
        header(length=0),
        header(length=513),
        header(length=65535),
        header(key=b"\xff\xfe"),
        header(size=1 << 40),
        header(size=(1 << 64) - 1),
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"\0" * 100,
    ],
)
def test_a_hostile_header_ends_its_connection_and_nothing_else(ends: Ends, kind: str, said: bytes) -> None:
    connection = let_in(landing := ends.landing(kind))
    connection.sendall(said)
    assert_thrown_out(connection)
    assert landing.num_bytes == landing.num_keys == 0
    assert_works(landing, "m/1")


@pytest.mark.parametrize("kind", BY_SOCKET)
def test_a_sender_that_stops_mid_header_is_disconnected(ends: Ends, kind: str) -> None:
    connection = let_in(ends.landing(kind, seconds=0.2))
    connection.sendall(header()[:9])
    assert_thrown_out(connection)


def test_a_waiting_take_fails_if_its_range_is_cut_off(ends: Ends) -> None:
    connection = let_in(landing := ends.landing("tcp"))
    connection.sendall(header(size=1 << 20) + b"a" * 1000)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(landing.take, "m/0", 1 << 20, timeout=100)
        connection.close()
        with pytest.raises(LinkError, match="m/0: did not arrive whole"):
            waiting.result()
    assert landing.num_bytes == 0


def test_a_repeated_key_ends_the_connection_and_keeps_the_first_range(ends: Ends) -> None:
    connection = let_in(landing := ends.landing("tcp"))
    connection.sendall(header() + b"abc" + header() + b"xyz")
    assert_thrown_out(connection)
    assert landing.take("m/0", 3, timeout=120) == b"abc"
    landing.done("m/0")


@pytest.mark.parametrize("kind", BY_SOCKET)
@pytest.mark.parametrize("what", ["foreign/0", "unwanted/0"])
def test_ranges_nobody_wants_are_not_kept(ends: Ends, kind: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "foreign/0":
        monkeypatch.setattr(inbox, "KEPT_SECONDS", 0.0)
    landing = ends.landing(kind)
    sending = ends.sending(landing.offer)
    if what == "unwanted/0":
        landing.done(what)  # given up before it came
    for key in (what, "m/0"):
        send(sending, key, pattern(5000))
    assert landing.take("m/0", 5000, timeout=120) == pattern(5000)
    assert landing.num_keys == 1
    landing.done("m/0")
    assert landing.num_bytes == 0


@pytest.mark.parametrize("kind", BY_SOCKET)
def test_a_sender_without_the_token_is_refused(ends: Ends, kind: str) -> None:
    landing = ends.landing(kind)
    stranger = json.dumps(json.loads(landing.offer) | {"token": "00" * 32})
    with pytest.raises(LinkError, match=r"closed|token|broke"):
        open_sending(stranger, seconds=5)
    assert_works(landing, "m/1")


@pytest.mark.parametrize("kind", BY_SOCKET)
def test_a_false_proof_gets_no_answer(ends: Ends, kind: str) -> None:
    landing = ends.landing(kind)
    stranger = connected(landing)
    assert stranger.recv(24, socket.MSG_WAITALL).startswith(frames.MAGIC)
    stranger.sendall(b"n" * 16 + b"p" * 32)
    assert_thrown_out(stranger)


def test_a_source_does_not_reveal_its_secret_to_an_impostor() -> None:
    """Another program may have the port by now; it learns nothing and is not believed."""
    landing = make_landing("tcp")
    offer = json.loads(landing.offer)
    landing.close()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as beside:
        offer["ways"][0]["port"] = listening.getsockname()[1]

        def impostor() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(frames.MAGIC + b"n" * 16)
                heard.extend(connection.recv(48, socket.MSG_WAITALL))
                connection.sendall(b"p" * 32)

        listens = beside.submit(impostor)
        with pytest.raises(LinkError, match="does not know the token"):
            open_sending(json.dumps(offer), seconds=10)
        listens.result()
    assert bytes.fromhex(offer["token"]) not in heard


@pytest.mark.parametrize("kind", BY_SOCKET)
def test_unauthenticated_connections_are_bounded_and_block_no_sender(ends: Ends, kind: str) -> None:
    landing = ends.landing(kind, seconds=2)
    sending = ends.sending(landing.offer)
    strangers = [connected(landing) for _ in range(3 * frames._MOST_STRANGERS)]
    send(sending, "m/0", b"abc")
    assert landing.take("m/0", 3, timeout=120) == b"abc"
    num_refused = 0
    for stranger in strangers:
        stranger.settimeout(30)
        num_refused += not stranger.recv(100)  # closed without a greeting
        while stranger.recv(100):
            pass
        stranger.close()
    assert num_refused > 0
    assert_works(landing, "m/1")


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.sampled_from(BY_SOCKET), st.lists(st.binary(max_size=60), max_size=4))
def test_arbitrary_bytes_leave_a_landing_usable(is_let_in: bool, kind: str, said: list[bytes]) -> None:
    landing = make_landing(kind, seconds=5)
    connection = let_in(landing)
    with suppress(OSError):  # thrown out already
        for each in said:
            connection.sendall(header(key=each[:8] or b"k", size=len(each)) + each if is_let_in else each)
    connection.close()
    assert_works(landing, "last")
    landing.close()
    assert landing.num_bytes == 0


def unsealed() -> int:
    file = os.memfd_create("rlhfspec-link", os.MFD_CLOEXEC)
    os.ftruncate(file, 4096)
    return file


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 4096)
        return os.dup(file.fileno())


def a_pipe() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


@pytest.mark.parametrize("make", [unsealed, a_file, a_pipe])
def test_memory_that_could_shrink_under_the_reader_is_refused(ends: Ends, make: Callable[[], int]) -> None:
    landing = ends.landing("shm")
    connection, file = let_in(landing), make()
    said = header()
    socket.send_fds(connection, [said[:1]], [file])
    connection.sendall(said[1:])
    os.close(file)
    with pytest.raises(LinkError, match="place"):
        landing.take("m/0", 3, timeout=120)
    assert_thrown_out(connection)


def test_a_shared_memory_place_that_was_not_handed_over_is_refused(ends: Ends) -> None:
    connection = let_in(landing := ends.landing("shm"))
    connection.sendall(header(at=7))
    with pytest.raises(LinkError, match="names no memory that was handed over"):
        landing.take("m/0", 3, timeout=120)
    assert_thrown_out(connection)


class Relay(Proxy):
    """Proxy of a landing that passes pieces on while `passes`, asked with the number of bytes before, is true."""

    def __init__(self, offer: str, passes: Callable[[int], bool], piece: int = 1 << 16) -> None:
        read = json.loads(offer)
        (way,) = read["ways"]
        super().__init__(way["host"], way["port"])
        self.piece, self._passes, self._num_bytes = piece, passes, 0
        self.offer = json.dumps(read | {"ways": [way | {"port": self.port}]})

    def _passed(self, piece: bytes) -> bytes:
        if not self._passes(self._num_bytes):
            raise OSError("it is cut")
        self._num_bytes += len(piece)
        return piece


def test_a_slow_link_delivers_the_right_bytes(ends: Ends) -> None:
    landing, content = ends.landing("tcp"), pattern(500_001)
    with Relay(landing.offer, lambda _: not time.sleep(0.0005), piece=4096) as relay:
        send(ends.sending(relay.offer), "m/0", content)
        assert landing.take("m/0", len(content), timeout=120) == content
        landing.done("m/0")


def test_a_connection_cut_in_mid_range_fails_at_both_ends(ends: Ends) -> None:
    landing = ends.landing("tcp")
    with Relay(landing.offer, lambda total: total < 8 << 20) as relay:
        sending = ends.sending(relay.offer, seconds=10)
        sending.room(64 << 20)
        with pytest.raises(LinkError, match=r"broke|closed"):
            sending.send("m/0", 64 << 20)
        with pytest.raises(LinkError, match="did not arrive whole"):
            landing.take("m/0", 64 << 20, timeout=120)
        assert landing.num_bytes == 0


def test_a_range_that_trickles_is_given_up_at_its_deadline(ends: Ends) -> None:
    """A hostile source must not hold memory for ever by sending slowly."""
    landing, stop = ends.landing("tcp", seconds=0.3), threading.Event()
    with Relay(landing.offer, lambda total: not stop.wait(0.05) or total < 1000, piece=1000) as relay:
        sending = ends.sending(relay.offer, seconds=10)
        sending.room(1 << 16)
        sending.send("m/0", 1 << 16)
        with pytest.raises(LinkError, match="did not arrive whole"):
            landing.take("m/0", 1 << 16, timeout=120)
        stop.set()


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    for folder in folders:
        create_credentials(folder, ["generator"])
    return folders


def test_with_credentials_bytes_travel_encrypted_and_whole(ends: Ends, credentials: tuple[Path, Path]) -> None:
    ours, _ = credentials
    landing = ends.landing("tcp", tls=server_tls(ours, "generator"))
    sending = ends.sending(landing.offer, tls=client_tls(ours, "generator"))
    content = pattern(3_000_001)
    for number in range(2):
        send(sending, f"m/{number}", content)
        assert landing.take(f"m/{number}", len(content), timeout=120) == content
        landing.done(f"m/{number}")


def test_credentials_of_another_run_are_refused(ends: Ends, credentials: tuple[Path, Path]) -> None:
    ours, theirs = credentials
    landing = ends.landing("tcp", tls=server_tls(ours, "generator"))
    with pytest.raises(LinkError, match="no TLS"):
        open_sending(landing.offer, tls=client_tls(theirs, "generator"), seconds=5)
    with pytest.raises(LinkError, match="one end has credentials"):
        open_sending(landing.offer, seconds=5)


def test_a_sender_without_a_certificate_is_refused(ends: Ends, credentials: tuple[Path, Path]) -> None:
    ours, _ = credentials
    landing = ends.landing("tcp", tls=server_tls(ours, "generator"))
    bare = ssl.create_default_context(cafile=str(ours / "ca.pem"))
    with pytest.raises(LinkError):
        open_sending(landing.offer, tls=bare, seconds=5)
