"""Sequences that move during decode keep their bits and always have one owner."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from askers import asking, served
from movers import LONG, TOKENS, Generator, all_bits, alone, generators
from moving import SUFFIX, TREE, bits, drain, make, model, request

from rlhfspec.errors import LinkError, MalformedRecord
from rlhfspec.messages.records import Moved
from rlhfspec.messages.servers.credentials.certificates import client_tls, create_credentials, server_tls
from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.base import NoReply, Peer
from rlhfspec.moves.migration.control import (
    HEADER,
    MOST_FRAME_BYTES,
    QUESTION,
    REFUSED,
    DirectControl,
    StreamControl,
    StreamControlServer,
)
from rlhfspec.moves.migration.links.opening import Links, make_landing, open_sending
from rlhfspec.tiny import perturbed

pytestmark = pytest.mark.turns(parts=2)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("kind", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX])
async def test_sequences_moved_while_both_engines_decode_keep_their_bits(kind: str, speculation: Any) -> None:
    rng = np.random.default_rng(5)
    async with generators(kind=kind, **LONG | {"speculation": speculation}) as made:
        names = [str(seed) for seed in range(4)]
        for index, name in enumerate(names):
            await made[index % 2].submit(name, seed=index, max_tokens=TOKENS)
        moves = []
        while any(each.engine.has_work for each in made) and len(moves) < 12:
            here = made[int(rng.integers(2))]
            running = [name for name in names if name in here.custody.prompts]
            if running:
                moves.append(await here.move(str(rng.choice(running)), made[1 - made.index(here)]))
            await asyncio.sleep(0)
        for each in made:
            await each.until(lambda each=each: not each.engine.has_work)
    assert all_bits(made) == {name: alone(seed) for seed, name in enumerate(names)}
    assert [moved.how for moved in moves].count("kv") >= 3, moves
    assert all(moved.num_bytes > 0 for moved in moves if moved.how == "kv")


@pytest.mark.parametrize("speculation", ["off", SUFFIX])
async def test_both_ends_of_moves_report_growing_progress(speculation: Any) -> None:
    """Moving back and forth, counts of tokens, steps and moves only grow, to those of the finished sample."""

    async with generators(**LONG | {"speculation": speculation}) as made:
        await made[0].submit("x", seed=1, max_tokens=TOKENS)
        await made[0].until(lambda: made[0].steps)  # what waits has no KV to take along
        for turn in range(4):
            here, there = made[turn % 2], made[1 - turn % 2]
            await here.until(lambda here=here: "x" in here.custody.prompts)
            assert (await here.move("x", there)).how == "kv"
        for each in made:
            await each.until(lambda each=each: not each.engine.has_work)
    left = [made[turn % 2].custody.left_with["x"][turn // 2] for turn in range(4)]
    came = [made[1 - turn % 2].custody.came_with["x"][turn // 2] for turn in range(4)]
    assert [each._replace(at=0.0) for each in left] == [each._replace(at=0.0) for each in came]
    assert [each.num_moves for each in left] == [0, 1, 2, 3]
    assert all(before.at <= after.at for before, after in pairwise(left))
    lengths = [each.num_tokens for each in left]
    assert lengths == sorted(lengths)
    done = made[0].finished["x"]
    steps = [dict(each.strategies) for each in left] + [dict(done.stats.strategies)]
    assert all(now[name] >= then for before, now in pairwise(steps) for name, then in before.items())
    assert left[-1].num_verifications <= done.stats.num_verifications
    assert done.stats.num_moves == 4


class CountingControl(DirectControl):
    num_ranges = 0

    async def ask(self, peer: Peer, message: bytes, **options: Any) -> bytes:
        self.num_ranges += isinstance(messages.told(message), messages.Range)
        return await super().ask(peer, message, **options)


PROMPT = tuple(number % 250 for number in range(400))


@pytest.mark.parametrize("is_hurried", [False, True])
async def test_a_prefilled_move_sends_chunk_by_chunk_and_leaves_with_the_whole_prompt(is_hurried: bool) -> None:
    """More ranges than an ordinary move has were sent before the first token. A generator that leaves waits no more."""
    options = LONG | {"prefill_chunk": 1}
    control = CountingControl()
    async with generators(control=control, **options) as (here, there):
        step = here.engine.step
        here.engine.step = lambda: time.sleep(0.002) or step()
        await here.submit("x", prompt=PROMPT, max_tokens=20)
        await here.until(lambda: here.steps)
        moving = asyncio.create_task(here.move("x", there, gain=0.0, prefilled=True))
        await here.until(lambda: control.num_ranges > 3)
        if is_hurried:
            await here.mover.refuse()
        moved = await moving
        await there.until(lambda: "x" in there.finished)
        num_prefilled = there.engine.stats().num_prefill_tokens
    assert moved.how == "kv"
    assert bool(num_prefilled) == is_hurried
    engine = make(**options)
    engine.submit(request("x", PROMPT, max_tokens=20))
    assert bits(there.finished["x"]) == bits(drain(engine)["x"])


async def test_a_prefilled_move_gives_up_a_prompt_that_gets_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs calls, but its steps do nothing. Afterwards the sample is generated where it is."""
    monkeypatch.setattr("rlhfspec.moves.migration.giving._CHUNK_SECONDS", 0.2)
    async with generators(**LONG | {"prefill_chunk": 1}) as (here, there):
        step = here.engine.step
        here.engine.step = lambda: time.sleep(0.002) or (SimpleNamespace(finished=()) if here.steps > 3 else step())
        await here.submit("x", prompt=PROMPT, max_tokens=20)
        await here.until(lambda: here.steps > 3)
        moved = await asyncio.wait_for(here.move("x", there, prefilled=True), 60)
        here.engine.step = step
    assert (moved.how, moved.reason) == ("kept", "waits: its prompt has got no further for 0.2 s")
    assert "x" in here.finished


async def test_a_prefilled_move_leaves_a_waiting_sequence_where_it_is() -> None:
    async with generators(**LONG | {"max_sequences": 1}) as (here, there):
        await here.submit("x", seed=1, max_tokens=200)
        await here.until(lambda: here.steps)
        await here.submit("y", seed=2, max_tokens=2)
        moved = await here.move("y", there, prefilled=True)
    assert (moved.how, moved.code, moved.reason) == ("kept", "waits", "waits: it has no KV yet")


ASK = messages.Ask(move="m", sample="x", number=1, source="s", destination="d")
QUESTIONED = messages.to_bytes(ASK)


async def test_only_a_generator_may_receive_sequences(tmp_path: Path) -> None:
    """Any stage could claim that a generator is at its address."""
    create_credentials(tmp_path, ["generator", "reward"])

    server = StreamControlServer(tls=server_tls(tmp_path, "reward"))
    server.serve(gone)
    peer = Peer(name="generator-1", address=server.address, incarnation="d")
    control = StreamControl(client_tls(tmp_path, "generator"), answerers=["generator"])
    try:
        with pytest.raises(NoReply, match="reward may not receive sequences"):
            await control.ask(peer, QUESTIONED)
    finally:
        control.close()
        server.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.msg.startswith("a request about a move is refused")
    ]


async def gone(message: bytes) -> bytes:
    return messages.to_bytes(messages.Gone(**messages.told(message).head(), here="e"))


async def test_only_generators_of_the_run_may_ask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    create_credentials(tmp_path / "ours", ["generator", "reward"])
    create_credentials(tmp_path / "others", ["generator"])

    async with served(gone, tmp_path / "ours", askers=["generator"]) as (peer, _):
        with asking(tmp_path / "ours") as control:
            reply = messages.reply(await control.ask(peer, QUESTIONED))
            assert isinstance(reply, messages.Gone)
            with pytest.raises(NoReply, match="is not a request"):
                await control.ask(peer, messages.to_bytes(reply))
            with pytest.raises(NoReply, match="malformed"):
                await control.ask(peer, b"nonsense")
        with asking(tmp_path / "ours", "reward") as control, pytest.raises(NoReply, match="reward may not"):
            await control.ask(peer, QUESTIONED)
        for credentials in (None, tmp_path / "others"):
            with asking(credentials) as control, pytest.raises(NoReply):
                await control.ask(peer, QUESTIONED, timeout=2.0)
        stranger = await connected(peer)  # and who never shakes hands, or with nonsense
        stranger.writer.write(b"\0" * 64)
        assert await stranger.read() == b""
        said = refusals(caplog)
        assert sum("malformed" in each for each in said) == 2
        assert sum("reward may not move sequences" in each for each in said) == 1
        assert len(said) == 2 + 1 + 3, "two strangers, and the one that never shakes hands"


async def test_a_call_without_a_reply_ends_at_its_timeout() -> None:
    never = asyncio.Event()
    ended = asyncio.Event()

    async def slow(message: bytes) -> bytes:
        await never.wait()
        ended.set()
        return b""

    direct = DirectControl()
    direct.serve("a", slow)
    async with served(slow) as (peer, _):
        with asking() as control:
            for way, whom in ((control, peer), (direct, Peer(name="a", address="a", incarnation="d"))):
                with pytest.raises(NoReply):
                    await way.ask(whom, QUESTIONED, timeout=0.2)
        never.set()
        await ended.wait()  # what was begun goes on
    with asking() as control, pytest.raises(NoReply):
        await control.ask(peer, QUESTIONED, timeout=2.0)


class Stranger:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def read(self) -> bytes:
        try:
            return await asyncio.wait_for(self._reader.read(), 30)
        except ConnectionResetError:
            return b""
        finally:
            self.writer.close()


async def connected(peer: Peer) -> Stranger:
    host, _, port = peer.address.rpartition(":")
    return Stranger(*await asyncio.open_connection(host, int(port)))


def frame(content: bytes, *, kind: int = QUESTION, length: int | None = None) -> bytes:
    return HEADER.pack(len(content) if length is None else length, 7, kind) + content


@pytest.mark.parametrize(
    "sent", [frame(b"", length=MOST_FRAME_BYTES + 1), frame(b"x", kind=9), b"GET / HTTP/1.1\r\n\r\n"]
)
async def test_invalid_frames_are_refused_and_connections_closed(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(gone) as (peer, _):
        stranger = await connected(peer)
        stranger.writer.write(sent)
        said = await stranger.read()
        assert HEADER.unpack_from(said)[1:] == (0, REFUSED)
        [refused] = refusals(caplog)
        assert "a frame of" in refused
        with asking() as control:
            await control.ask(peer, QUESTIONED)  # others are served


@pytest.mark.parametrize("sent", [b"", frame(QUESTIONED)[:5], frame(QUESTIONED)[:-1], frame(QUESTIONED) + b"\0"])
async def test_an_incomplete_frame_times_out(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with served(gone, frame_seconds=0.2) as (peer, _):
        stranger = await connected(peer)
        stranger.writer.write(sent)
        await stranger.read()
        [refused] = refusals(caplog)
        assert "no complete frame in time" in refused


async def test_a_frame_sent_byte_by_byte_times_out(caplog: pytest.LogCaptureFixture) -> None:
    async with served(gone, frame_seconds=0.3) as (peer, _):
        stranger = await connected(peer)
        reading = asyncio.create_task(stranger.read())
        while not reading.done():
            stranger.writer.write(b"\0")
            await asyncio.wait([reading], timeout=0.05)
            assert stranger.writer.transport.get_write_buffer_size() == 0 or reading.done()
        [refused] = refusals(caplog)
        assert "no complete frame in time" in refused or "a frame of" in refused


async def test_split_and_joined_frames_are_answered() -> None:
    async with served(gone) as (peer, _):
        stranger = await connected(peer)
        whole = frame(QUESTIONED)
        for part in (whole[:3], whole[3:20], whole[20:] + whole):
            stranger.writer.write(part)
            await stranger.writer.drain()
        stranger.writer.write_eof()
        said = await stranger.read()
        length = HEADER.unpack_from(said)[0]
        assert len(said) == 2 * (HEADER.size + length)


async def test_a_slow_question_blocks_no_other_and_too_many_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    last = asyncio.Event()

    async def answer(message: bytes) -> bytes:
        if message != b"quick":
            await last.wait()
        return message

    async with served(answer) as (peer, server):
        with asking() as control:
            slow = [asyncio.create_task(control.ask(peer, str(number).encode())) for number in range(63)]
            assert await control.ask(peer, b"quick") == b"quick"
            slow.append(asyncio.create_task(control.ask(peer, b"63")))
            while server.num_questions < 64:
                await asyncio.sleep(0)
            with pytest.raises(NoReply, match="too many"):
                await control.ask(peer, b"quick")
            last.set()
            assert await asyncio.gather(*slow) == [str(number).encode() for number in range(64)]
        [refused] = refusals(caplog)
        assert "too many requests at once" in refused


async def test_a_server_that_dies_is_no_reply_and_its_next_life_is_found() -> None:
    heard = asyncio.Event()

    async def never(message: bytes) -> bytes:
        heard.set()
        await asyncio.Event().wait()
        return b""

    with asking() as control:
        async with served(never) as (peer, first):
            waiting = asyncio.create_task(control.ask(peer, QUESTIONED))
            await heard.wait()
            first.close()
            with pytest.raises(NoReply):
                await waiting
            with pytest.raises(NoReply):
                await control.ask(peer, QUESTIONED)
        async with served(gone, port=int(peer.address.rpartition(":")[2])):
            await control.ask(peer, QUESTIONED)
        for address in ("nowhere", "127.0.0.1:port", "127.0.0.1:70000", ""):
            with pytest.raises(NoReply):
                await control.ask(Peer(name="", address=address, incarnation=""), QUESTIONED)


async def test_an_invalid_reply_counts_as_no_reply() -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(frame(b"", length=MOST_FRAME_BYTES + 1))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with asking() as control, pytest.raises(NoReply):
            await control.ask(Peer(name="", address=f"{host}:{port}", incarnation=""), QUESTIONED)


async def test_a_direct_call_raises_the_error_of_a_malformed_message() -> None:
    direct = DirectControl()
    direct.serve("a", gone)
    with pytest.raises(MalformedRecord):
        await direct.ask(Peer(name="a", address="a", incarnation="d"), b"nonsense")


class Struck(DirectControl):
    """Control that fails at the first message of one kind, on the way there or back."""

    def __init__(self, kind: type[messages.MoveMessage], when: str, *, times: int = 1) -> None:
        super().__init__()
        self.kind, self.when, self.times = kind, when, times
        self.heard: list[messages.MoveMessage] = []
        self.before: Callable[[], Any] | None = None  # done instead of failing

    async def ask(self, peer: Peer, message: bytes, *, timeout: float = 6.0) -> bytes:
        said = messages.from_bytes(message)
        self.heard.append(said)
        strikes = isinstance(said, self.kind) and self.times > 0
        self.times -= strikes
        if strikes and self.before is not None:
            await self.before()
            return await super().ask(peer, message, timeout=timeout)
        if strikes and self.when == "there":
            raise NoReply(peer.address, "cut on the way there")
        reply = await super().ask(peer, message, timeout=timeout)
        if strikes and self.when == "damaged":
            return reply[:-1]
        if strikes:
            raise NoReply(peer.address, "cut on the way back")
        return reply


async def one_move(made: list[Generator], **options: Any) -> Moved:
    here, there = made
    await here.submit("x", seed=3, max_tokens=TOKENS)
    await there.submit("y", seed=4, max_tokens=TOKENS)
    await here.until(lambda: here.steps > 3)
    moved = await here.move("x", there, **options)
    for each in made:
        await each.until(lambda each=each: not each.engine.has_work)
    return moved


def check_bits(made: list[Generator], *, lost: tuple[str, ...] = ()) -> None:
    wanted = {name: alone(seed) for name, seed in (("x", 3), ("y", 4)) if name not in lost}
    assert all_bits(made) == wanted


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("when", ["there", "back", "damaged"])
@pytest.mark.parametrize(
    ("kind", "how"),
    [(messages.Reserve, {"kept"}), (messages.Range, {"kept"}), (messages.HandOver, {"kv", "kept"}),
     (messages.Settled, {"kv"})],
)  # fmt: skip
async def test_a_move_survives_any_failing_message(kind: type[messages.MoveMessage], when: str, how: set[str]) -> None:
    control = Struck(kind, when)
    async with generators(control=control, **LONG) as made:
        moved = await one_move(made)
    assert control.times == 0, "it was struck"
    assert moved.how in how, moved
    if kind is messages.HandOver:
        assert moved.how == ("kept" if when == "there" else "kv"), "the answer to Ask says which"
        assert moved.pause_seconds > 0.0, "it stood still until then"
        assert any(isinstance(each, messages.Ask) for each in control.heard)
    check_bits(made)


async def test_a_source_that_never_learns_the_outcome_counts_the_sample_as_lost() -> None:
    """The destination has the sequence; its source is cut off, and forgets it when it leaves."""

    control = Struck(messages.HandOver | messages.Ask, "back", times=1000)  # type: ignore[arg-type]
    async with generators(control=control, **LONG) as made:
        here, there = made
        await here.submit("x", seed=3, max_tokens=TOKENS)
        moving = asyncio.create_task(here.move("x", there))
        await there.until(lambda: "x" in there.custody.prompts)
        await here.mover.close()
        moved = await moving
        assert moved.how == "lost"
        assert here.custody.lost == ["x"]
        assert [each.num_moves for each in there.custody.came_with["x"]] == [0]
        assert "leaving" in (await here.move("x", there)).reason
    assert all_bits(made) == {"x": alone(3)}


class BrokenSending:
    def __init__(self, offer: str, at: str) -> None:
        self.inner, self.at = open_sending(offer), at

    def room(self, num_bytes: int) -> memoryview:
        if self.at == "room":
            raise LinkError("link", "cut")
        return self.inner.room(num_bytes)

    def send(self, key: str, num_bytes: int) -> None:
        if self.at == "send":
            raise LinkError("link", "cut")
        if self.at == "lies":
            self.inner.room(num_bytes)[:] = bytes(num_bytes)
        self.inner.send(key, num_bytes)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("must_go", [False, True])
@pytest.mark.parametrize("at", ["open", "room", "send", "lies"])
async def test_a_failing_link_keeps_the_sequence_or_moves_its_tokens(at: str, must_go: bool) -> None:
    """The sequence stays or, from a leaving generator, moves its tokens without KV."""

    def links(index: int) -> Links:
        def opened(offer: str) -> Any:
            if at == "open":
                raise LinkError("link", "cut")
            return BrokenSending(offer, at)

        return Links(make_landing("memory"), opened)

    async with generators(links=links, **LONG) as made:
        moved = await one_move(made, must_go=must_go)
    goes = must_go and at != "lies"
    assert moved.how == ("tokens" if goes else "kept"), moved
    assert goes or ("checksum" if at == "lies" else "cut") in moved.reason
    check_bits(made)


Strike = Callable[[list[Generator]], Any]


async def preempted(made: list[Generator]) -> None:
    await made[0].calls.call(lambda: made[0].engine.preempt("x"))


async def cancelled(made: list[Generator]) -> None:
    """Assert that no cancelled sample is lost: a halted one continues at the destination if taken."""

    def cancel() -> None:
        if "x" in made[0].engine.state.sequences:
            made[0].forget("x")
        made[0].engine.cancel("x")

    await made[0].calls.call(cancel)


async def other_weights_there(made: list[Generator]) -> None:
    await made[1].calls.call(lambda: made[1].engine.load_weights(NEWER, version=3))


async def other_weights_here(made: list[Generator]) -> None:
    await made[0].calls.call(lambda: made[0].engine.load_weights(NEWER, version=3))


async def other_process(made: list[Generator]) -> None:
    made[1].mover._taking.machine.incarnation = "another"


NEWER = perturbed(model(), 0.3).state_dict()
KINDS = [messages.Reserve, messages.Range, messages.HandOver]


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strike", [preempted, other_weights_there, other_weights_here, cancelled, other_process])
async def test_events_at_one_end_leave_every_sequence_right(strike: Strike, kind: type[messages.MoveMessage]) -> None:
    control = Struck(kind, "")
    async with generators(control=control, **LONG) as made:
        control.before = lambda: strike(made)
        moved = await one_move(made)
    assert control.times == 0
    finished = all_bits(made)
    if strike is cancelled:
        assert finished.keys() == ({"x", "y"} if kind is messages.HandOver else {"y"})
    elif strike in (preempted, other_process):
        check_bits(made)
        assert strike is preempted or moved.how == "kept"
    else:
        assert finished.keys() == {"x", "y"}
        where = made[0] if moved.how == "kept" else made[1]
        assert set(where.finished["x"].weights_versions) <= {0, 3}
    if strike is other_weights_there:
        assert (moved.how, moved.num_recomputed > 0) == ("tokens", True), moved
    if strike is other_weights_here:
        assert moved.how == ("kv" if kind is messages.HandOver else "kept"), "newer than there before it stopped"


async def test_moves_to_unknown_peers_or_of_unknown_sequences_give_a_reason() -> None:
    async with generators(**LONG) as made:
        here, _ = made
        await here.submit("x", seed=3, max_tokens=TOKENS)
        nobody = Peer(name="no", address="nowhere", incarnation="no-1")
        assert "no process there" in (await here.move("x", nobody)).reason
        assert "not at this generator" in (await here.move("z", nobody)).reason
