"""A moving sequence has one owner, or none and its prompt is redelivered, on any network."""

import dataclasses
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st
from moving_world import World, any_of

from rlhfspec.errors import MalformedRecord
from rlhfspec.moves.migration import destination as theirs, messages, source as ours
from rlhfspec.moves.migration.destination import LEASE_SECONDS, Destination
from rlhfspec.moves.migration.messages import from_bytes, to_bytes
from rlhfspec.moves.migration.source import MoveSource

HEAD: dict[str, Any] = {"move": "m", "sample": "x", "number": 1, "source": "s", "destination": "d"}
RESERVE = messages.Reserve(**HEAD, manifest=b"manifest", weights_version=3, has_kv=True)
HAND_OVER = messages.HandOver(**HEAD, state=b"s", kv=b"k", key="k", num_bytes=1, prompt=b"p", token="t")


def lives(seeds: range, **bugs: Any) -> Counter[str]:
    ends: Counter[str] = Counter()
    for seed in seeds:
        world, rng = World(**bugs), Random(seed)
        for _ in range(120):
            any_of(rng, world)
        world.settle()
        ends.update(world.ends)
    return ends


def test_random_histories_of_moves_end_with_one_owner_each() -> None:
    ends = lives(range(600))
    assert min(ends[how] for how in ("kv", "tokens", "kept")) > 50, "what is checked does happen"
    assert ends["lost"] > 0


class NoTombstone(Destination):
    def _judge(self, message: Any, now: float) -> Any:
        judged = super()._judge(message, now)
        if isinstance(message, messages.Ask):
            self._source(message.source).fates.pop(message.number, None)
        return judged


class ForgetsWhatItTook(Destination):
    def _taken(self, message: Any) -> Any:
        self._source(message.source).settle(message.number, "refused")
        return super()._taken(message)


class TakesWithoutALease(Destination):
    def _judge(self, message: Any, now: float) -> Any:
        source, is_free = self._source(message.source), message.sample not in self._leases
        if isinstance(message, messages.HandOver) and is_free and source.fate(message.number) != "taken":
            source.settle(message.number, "open")
            reserve = messages.Reserve(**message.head(), manifest=b"", weights_version=0, has_kv=False)
            self._leases[message.sample] = theirs._Lease(reserve, now)
        return super()._judge(message, now)


class PassesOnAtOnce(Destination):
    def may_leave(self, sample: str, now: float) -> bool:
        return True


class NoDoubt(MoveSource):
    def _doubt(self, event: Any, now: float) -> Any:
        if isinstance(event, ours.Silence):
            return [ours.Reattach(), *self._keep(ours.SILENT, "no reply")]
        return super()._doubt(event, now)


class TakesBackAfterDoubt(MoveSource):
    def _doubt(self, event: Any, now: float) -> Any:
        actions = super()._doubt(event, now)
        if any(isinstance(action, ours.LetGo) and not action.is_known for action in actions):
            return [ours.Reattach(), ours.MoveEnd("kept")]
        return actions


class BelievesGoneForEver(MoveSource):
    def _doubt(self, event: Any, now: float) -> Any:
        if isinstance(event, ours.Heard) and isinstance(event.reply, messages.Gone):
            return [ours.Reattach(), *self._keep(ours.GONE, "gone")]
        return super()._doubt(event, now)


@pytest.mark.parametrize(("bug", "first"), [(NoTombstone, 1500), (ForgetsWhatItTook, 150), (TakesWithoutALease, 1100)])
def test_a_broken_rule_of_the_destination_is_detected(bug: Callable[[str], Destination], first: int) -> None:
    """`first` is a seed near the failing life, which saves time."""
    with pytest.raises(AssertionError):
        lives(range(first, first + 3000), make_destination=bug)


@pytest.mark.parametrize("bug", [NoDoubt, TakesBackAfterDoubt])
def test_a_broken_rule_of_the_source_is_detected(bug: Callable[..., MoveSource]) -> None:
    with pytest.raises(AssertionError):
        lives(range(3000), make_source=bug)


def handed_over_and_nobody_said_so(**bugs: Any) -> World:
    """Return a world where 1 took the sequence from 0, and no reply arrived."""
    world = World(samples=1, **bugs)
    world.move(0, "s0", 1)
    for _ in range(20):
        world.deliver(0)
        world.work(1)
        if "s0" in world.nodes[1].engine.running:
            world.replies.clear()
            return world
        world.reply(0)
    raise AssertionError("it was never taken")


def passed_on(world: World) -> World:
    world.move(1, "s0", 2)
    for _ in range(20):
        world.deliver(0)
        world.work(2)
        world.reply(0)
    world.crash(1)
    world.silence(0)
    for _ in range(4):
        world.advance(0.6)
        world.deliver(0)
        world.reply(0)
        world.check()
    world.settle()
    return world


def test_a_moved_sample_is_not_passed_on_before_its_source_let_go() -> None:
    world = passed_on(handed_over_and_nobody_said_so())
    assert world.ends == ["kept"], "1 kept it, and died with it; 0 had not forgotten it"
    with pytest.raises(AssertionError, match="s0 runs at"):
        passed_on(handed_over_and_nobody_said_so(make_destination=PassesOnAtOnce))


def passed_on_long_after(world: World) -> World:
    """Pass the sequence on while 0 is cut off, so that it first hears of 1's end."""
    world.advance(theirs.SETTLED_SECONDS + 1)
    world.move(1, "s0", 2)
    for _ in range(20):
        world.deliver(0)
        world.work(2)
        world.reply(0)
    assert "s0" in world.nodes[2].engine.running
    gone = messages.Gone(
        move="m0.0", sample="s0", number=1, here="n1-9",
        source=world.nodes[0].incarnation, destination=world.nodes[1].incarnation,
    )  # fmt: skip
    world.crash(1)
    world.say(world.nodes[0], "s0", ours.Heard(gone))
    world.check()
    world.settle()
    return world


def test_a_source_ignores_news_that_arrives_after_its_doubt_expired() -> None:
    assert passed_on_long_after(handed_over_and_nobody_said_so()).ends == ["kv", "lost"]
    with pytest.raises(AssertionError, match="s0 runs at"):
        passed_on_long_after(handed_over_and_nobody_said_so(make_source=BelievesGoneForEver))


REPLIES = [
    messages.Reserved(**HEAD, mark=b"mark", offer="{}"), messages.Copied(**HEAD, key="k"),
    messages.Taken(**HEAD, num_recomputed=4), messages.Refused(**HEAD, field="room", reason="none"),
    messages.Unknown(**HEAD), messages.Gone(**HEAD, here="e"),
]  # fmt: skip
TOLD = [
    RESERVE, messages.Range(**HEAD, kv=b"kv", key="k", num_bytes=9), HAND_OVER,
    messages.Abort(**HEAD), messages.Ask(**HEAD), messages.Settled(**HEAD),
]  # fmt: skip


@pytest.mark.parametrize("message", [*TOLD, *REPLIES], ids=lambda each: type(each).__name__)
def test_a_message_comes_back_whole(message: messages.MoveMessage) -> None:
    assert from_bytes(to_bytes(message)) == message
    right, wrong = (messages.told, messages.reply) if message in TOLD else (messages.reply, messages.told)
    assert right(to_bytes(message)) == message
    with pytest.raises(MalformedRecord):
        wrong(to_bytes(message))


@given(st.data())
def test_damaged_bytes_are_refused(data: st.DataObject) -> None:
    good = to_bytes(data.draw(st.sampled_from([*TOLD, *REPLIES])))
    place = data.draw(st.integers(0, len(good) - 1))
    for bad in (good[:place], good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :]):
        with pytest.raises(MalformedRecord):
            from_bytes(bad)
    with pytest.raises(MalformedRecord):
        from_bytes(data.draw(st.binary(max_size=64)))


def sealed(header: object, rest: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    body = b"RLHFTELL" + len(text).to_bytes(4, "little") + text + rest
    return body + zlib.crc32(body).to_bytes(4, "little")


LIES = [None, True, -1, 0.5, 1 << 70, "", "x", "x" * 5000, [], [1], {}, {"message": "Ask"}]


@given(st.data())
def test_a_header_that_lies_is_refused_or_harmless(data: st.DataObject) -> None:
    good = to_bytes(data.draw(st.sampled_from([*TOLD, *REPLIES])))
    length = int.from_bytes(good[8:12], "little")
    header, rest = json.loads(good[12 : 12 + length]), good[12 + length : -4]
    for field in data.draw(st.lists(st.sampled_from([*header, "new"]), min_size=1, max_size=3)):
        header[field] = data.draw(st.sampled_from(LIES))
    try:
        message = from_bytes(sealed(header, rest))
    except MalformedRecord:
        return
    end = Destination("d")
    if isinstance(message, messages.Told):
        assert end.arrived(message, 0.0)


@pytest.mark.parametrize("header", [[], None, "x", {"message": "Message"}, {"message": "__class__"}, {"message": []}])
def test_a_message_with_an_invalid_header_is_refused(header: object) -> None:
    with pytest.raises(MalformedRecord):
        from_bytes(sealed(header))


def test_leases_beyond_the_limit_are_refused() -> None:
    end = Destination("d")
    for index in range(theirs.MOST_LEASES):
        message = dataclasses.replace(RESERVE, sample=f"x{index}", number=index + 1)
        assert end.arrived(message, 0.0) == ([], None), "it is to be carried out"
        end.done(message, 0.0, mark=b"mark")
    late = dataclasses.replace(RESERVE, number=99)
    assert isinstance(end.arrived(late, 1.0).reply, messages.Refused)
    assert len(end.expire(LEASE_SECONDS)) == theirs.MOST_LEASES
    assert not end.arriving
    assert end.arrived(late, LEASE_SECONDS).reply is not None, "its number is used up"


def test_a_forgotten_move_is_answered_with_unknown() -> None:
    end = Destination("d")
    end.arrived(RESERVE, 0.0)
    end.done(RESERVE, 0.0)
    end.arrived(HAND_OVER, 0.0)
    assert isinstance(end.done(HAND_OVER, 0.0).reply, messages.Taken)
    for number in range(2, theirs.MOST_REMEMBERED + 2):
        end.arrived(messages.Abort(**HEAD | {"number": number}), 0.0)
    assert end.arrived(messages.Ask(**HEAD), 0.0).reply == messages.Unknown(**HEAD)


def test_a_finished_source_ignores_further_events() -> None:
    machine = MoveSource("m", "x", source="s", destination="d", numbers=itertools.count(1))
    machine.start()
    machine.on(ours.Failed("finished", "length"), 0.0)
    assert machine.state == "over"
    assert machine.on(ours.SourceTick(), 99.0) == []


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (ours.GiveUp("its generator is leaving"), ours.STAYS),
        (ours.Failed("waits", "it has no KV yet"), "waits"),
        (ours.Silence(), ours.SILENT),
        (ours.Heard(messages.Refused(**HEAD, field="room", reason="0 free rows")), "room"),
        (ours.Heard(messages.Gone(**HEAD, here="other")), ours.GONE),
    ],
)
def test_a_kept_sequence_comes_with_the_code_of_its_cause(event: Any, code: str) -> None:
    source = MoveSource("m", "x", source="s", destination="d", numbers=itertools.count(1))
    source.start()
    source.on(ours.Described(b"manifest", 3, has_kv=True), 0.0)
    *_, end = source.on(event, 0.0)
    assert isinstance(end, ours.MoveEnd)
    assert (end.how, end.code) == ("kept", code)
