"""Control messages and KV links of moves: permissions and invalid input."""

import asyncio
from pathlib import Path

import pytest
from askers import asking, served

from rlhfspec.errors import MalformedRecord
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

ASK = messages.Ask(move="m", sample="x", number=1, source="s", destination="d")
QUESTIONED = messages.to_bytes(ASK)


async def test_only_a_generator_is_asked(tmp_path: Path) -> None:
    """Any stage could claim that a generator is at its address."""
    create_credentials(tmp_path, ["generator", "reward"])

    server = StreamControlServer(tls=server_tls(tmp_path, "reward"))
    server.serve(gone)
    peer = Peer(name="generator-1", address=server.address, incarnation="d")
    control = StreamControl(client_tls(tmp_path, "generator"), answerers=["generator"])
    try:
        with pytest.raises(NoReply, match="reward may take no sequences"):
            await control.ask(peer, QUESTIONED)
    finally:
        control.close()
        server.close()


async def gone(message: bytes) -> bytes:
    return messages.to_bytes(messages.Gone(**messages.told(message).head(), here="e"))


async def test_only_generators_of_the_run_may_ask(tmp_path: Path) -> None:
    create_credentials(tmp_path / "ours", ["generator", "reward"])
    create_credentials(tmp_path / "others", ["generator"])

    async with served(gone, tmp_path / "ours", askers=["generator"]) as (peer, server):
        with asking(tmp_path / "ours") as control:
            reply = messages.reply(await control.ask(peer, QUESTIONED))
            assert isinstance(reply, messages.Gone)
            with pytest.raises(NoReply, match="no question"):
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
        assert server.refused.pop("stranger") == 3
        assert dict(server.refused) == {"malformed": 2, "role": 1}


async def test_who_does_not_answer_in_time_is_not_waited_for() -> None:
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
async def test_what_is_no_question_is_refused_and_hung_up_on(sent: bytes) -> None:
    async with served(gone) as (peer, server):
        stranger = await connected(peer)
        stranger.writer.write(sent)
        said = await stranger.read()
        assert HEADER.unpack_from(said)[1:] == (0, REFUSED)
        assert dict(server.refused) == {"frame": 1}
        with asking() as control:
            await control.ask(peer, QUESTIONED)  # others are served


@pytest.mark.parametrize("sent", [b"", frame(QUESTIONED)[:5], frame(QUESTIONED)[:-1], frame(QUESTIONED) + b"\0"])
async def test_half_a_frame_is_not_waited_for(sent: bytes) -> None:
    async with served(gone, frame_seconds=0.2) as (peer, server):
        stranger = await connected(peer)
        stranger.writer.write(sent)
        await stranger.read()
        assert dict(server.refused) == {"slow": 1}


async def test_bytes_one_by_one_win_no_time() -> None:
    async with served(gone, frame_seconds=0.3) as (peer, server):
        stranger = await connected(peer)
        reading = asyncio.create_task(stranger.read())
        while not reading.done():
            stranger.writer.write(b"\0")
            await asyncio.wait([reading], timeout=0.05)
            assert stranger.writer.transport.get_write_buffer_size() == 0 or reading.done()
        assert server.refused["slow"] + server.refused["frame"] == 1


async def test_a_frame_in_pieces_and_two_at_once_are_heard() -> None:
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


async def test_one_question_waits_for_none_before_it_and_too_many_are_refused() -> None:
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
        assert dict(server.refused) == {"busy": 1}


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
        port = int(peer.address.rpartition(":")[2])
        async with served(gone, port=port):
            await control.ask(peer, QUESTIONED)
        for address in ("nowhere", "127.0.0.1:port", "127.0.0.1:70000", ""):
            with pytest.raises(NoReply):
                await control.ask(Peer(name="", address=address, incarnation=""), QUESTIONED)


async def test_a_reply_that_is_none_is_no_reply() -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(frame(b"", length=MOST_FRAME_BYTES + 1))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(lie, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with asking() as control, pytest.raises(NoReply):
            await control.ask(Peer(name="", address=f"{host}:{port}", incarnation=""), QUESTIONED)


async def test_a_direct_call_passes_on_what_is_no_message() -> None:
    direct = DirectControl()
    direct.serve("a", gone)
    with pytest.raises(MalformedRecord):
        await direct.ask(Peer(name="a", address="a", incarnation="d"), b"nonsense")
