"""What every link promises, over all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from link_checks import NIXL, landing_of, nothing_left, pattern, warm

from rlhfspec.errors import InvalidRequest, LinkError
from rlhfspec.moves.migration.links.base import Landing, Sending
from rlhfspec.moves.migration.links.opening import make_landing, open_sending

KINDS = ["memory", "shm", "tcp", "torch", *NIXL]
Pair = tuple[Landing, Sending]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm("torch")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    landing = landing_of(kind)
    sending = open_sending(landing.offer)
    yield landing, sending
    sending.close()
    landing.close()


def send(sending: Sending, key: str, content: bytes) -> None:
    sending.room(len(content))[:] = content
    sending.send(key, len(content))


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 4 << 20, 67 << 20])
def test_bytes_arrive_whole(pair: Pair, num_bytes: int) -> None:
    landing, sending = pair
    content = pattern(num_bytes)
    with ThreadPoolExecutor(1) as beside:
        sent = beside.submit(send, sending, "m/0", content)
        assert landing.take("m/0", num_bytes, timeout=30) == content
        sent.result()
    landing.done("m/0")


def test_ranges_of_many_moves_are_told_apart_and_memory_is_used_again(pair: Pair) -> None:
    landing, sending = pair
    for round_ in range(20):
        keys = [f"move-{m}/{round_}" for m in range(3)]
        for place, key in enumerate(keys):
            send(sending, key, pattern(5000 + place, seed=place + round_))
        for place, key in reversed(list(enumerate(keys))):
            assert landing.take(key, 5000 + place, timeout=10) == pattern(5000 + place, seed=place + round_)
            landing.done(key)


def test_what_lies_there_is_not_touched_before_it_is_done(pair: Pair) -> None:
    landing, sending = pair
    send(sending, "a", b"first")
    first = landing.take("a", 5, timeout=10)
    send(sending, "b", b"other")
    assert landing.take("b", 5, timeout=10) == b"other"
    assert first == b"first"


def test_many_sources_at_once(kind: str) -> None:
    landing = landing_of(kind)
    barrier = threading.Barrier(8)

    def source(index: int) -> None:
        sending = open_sending(landing.offer)
        barrier.wait(30)
        for number in range(10):
            send(sending, f"{index}/{number}", pattern(30_000, seed=index + number))
        barrier.wait(30)
        sending.close()

    with ThreadPoolExecutor(8) as sources:
        running = [sources.submit(source, index) for index in range(8)]
        for number in range(10):
            for index in range(8):
                key = f"{index}/{number}"
                assert landing.take(key, 30_000, timeout=30) == pattern(30_000, seed=index + number)
                landing.done(key)
        for each in running:
            each.result()
    landing.close()


def test_what_does_not_come_is_told_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(LinkError, match=r"m/0: did not come within 0\.05 s"):
        pair[0].take("m/0", 4, timeout=0.05)


def test_another_length_is_refused(pair: Pair) -> None:
    send(pair[1], "m/0", b"abc")
    with pytest.raises(LinkError, match="has 3 bytes, not 4"):
        pair[0].take("m/0", 4, timeout=10)


def test_closing_wakes_who_waits(kind: str) -> None:
    landing = landing_of(kind)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(landing.take, "m/0", 4, timeout=100)
        landing.close()
        with pytest.raises(LinkError, match="is closed"):
            waiting.result()


def test_a_closed_landing_ends_its_sendings(kind: str) -> None:
    landing = landing_of(kind)
    sending = open_sending(landing.offer)
    send(sending, "m/0", b"abc")
    landing.close()
    with pytest.raises(LinkError):
        sending.room(4)
    sending.close()


def test_memory_of_the_destination_is_bounded(kind: str) -> None:
    """And what nobody takes makes room again, at last."""
    landing = landing_of(kind, most_bytes=1 << 20, seconds=0.3)
    sending = open_sending(landing.offer, seconds=0.3)
    with pytest.raises(LinkError):  # noqa: PT012 over some links the source notices one range later
        for number in range(40):
            send(sending, f"m/{number}", pattern(300_000))
    sending.close()
    landing.close()


def test_the_first_way_that_both_share_is_taken() -> None:
    landing = make_landing("auto")
    sending = open_sending(landing.offer)
    assert type(sending).__name__ == "MemorySending"
    sending.close()
    landing.close()


@pytest.mark.parametrize(
    "offer", ["", "[]", "{}", '{"token": 1, "ways": []}', '{"token": "zz", "ways": [{}]}', "[" * 9999]
)
def test_an_offer_that_is_none_is_refused(offer: str) -> None:
    with pytest.raises(LinkError, match="offer: is none of a link"):
        open_sending(offer)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(InvalidRequest, match="did you mean tcp"):
        make_landing("tcpp")
