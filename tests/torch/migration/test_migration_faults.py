"""After any fault in any phase of a move, one owner continues with the same bits and nothing leaks."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from movers import LONG, TOKENS, Generator, all_bits, alone, generators
from moving import model

from rlhfspec.errors import LinkError
from rlhfspec.messages.records import Moved
from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.base import NoReply, Peer
from rlhfspec.moves.migration.control import DirectControl
from rlhfspec.moves.migration.links.opening import Links, make_landing, open_sending
from rlhfspec.tiny import perturbed


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
async def test_a_control_that_fails_at_any_message(kind: type[messages.MoveMessage], when: str, how: set[str]) -> None:
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


async def test_nobody_says_whether_it_was_taken() -> None:
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
async def test_a_link_that_fails(at: str, must_go: bool) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strike", [preempted, other_weights_there, other_weights_here, cancelled, other_process])
async def test_what_happens_at_one_end_meanwhile(strike: Strike, kind: type[messages.MoveMessage]) -> None:
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


async def test_nobody_there_and_nothing_here() -> None:
    async with generators(**LONG) as made:
        here, _ = made
        await here.submit("x", seed=3, max_tokens=TOKENS)
        nobody = Peer(name="no", address="nowhere", incarnation="no-1")
        assert "no process there" in (await here.move("x", nobody)).reason
        assert "not here" in (await here.move("z", nobody)).reason
