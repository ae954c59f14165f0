"""Contract of links (`moves.migration.links.base`): bytes by key arrive whole, or a LinkError by a deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import Sending
from rlhfspec.moves.migration.links.inbox import Landing
from rlhfspec.moves.migration.links.opening import open_sending


def pattern(num_bytes: int, seed: int = 0) -> bytes:
    piece = bytes((7 * i + seed) % 251 for i in range(251))
    return (piece * (num_bytes // 251 + 1))[:num_bytes]


def send(sending: Sending, key: str, content: bytes) -> None:
    sending.room(len(content))[:] = content
    sending.send(key, len(content))


class LinkContract:
    """Test suite of a link. Subclasses define `landing`, and `sending` unless `job.choices.links` has an entry."""

    def landing(self, **settings: Any) -> Landing:
        """Return a new destination; `settings` are arguments of `make_landing`."""
        raise NotImplementedError

    def sending(self, offer: str, **settings: Any) -> Sending:
        return open_sending(offer, **settings)

    @contextmanager
    def pair(self) -> Iterator[tuple[Landing, Sending]]:
        landing = self.landing()
        sending = self.sending(landing.offer)
        try:
            yield landing, sending
        finally:
            sending.close()
            landing.close()

    @pytest.mark.parametrize("num_bytes", [0, 1, 4097, 4 << 20, 67 << 20])
    def test_bytes_arrive_whole(self, num_bytes: int) -> None:
        content = pattern(num_bytes)
        with self.pair() as (landing, sending), ThreadPoolExecutor(1) as beside:
            sent = beside.submit(send, sending, "m/0", content)
            assert landing.take("m/0", num_bytes, timeout=30) == content
            sent.result()
            landing.done("m/0")

    def test_ranges_of_many_moves_are_told_apart_and_memory_is_used_again(self) -> None:
        with self.pair() as (landing, sending):
            for round_ in range(20):
                keys = [f"move-{m}/{round_}" for m in range(3)]
                for place, key in enumerate(keys):
                    send(sending, key, pattern(5000 + place, seed=place + round_))
                for place, key in reversed(list(enumerate(keys))):
                    assert landing.take(key, 5000 + place, timeout=10) == pattern(5000 + place, seed=place + round_)
                    landing.done(key)

    def test_what_lies_there_is_not_touched_before_it_is_done(self) -> None:
        with self.pair() as (landing, sending):
            send(sending, "a", b"first")
            first = landing.take("a", 5, timeout=10)
            send(sending, "b", b"other")
            assert bytes(landing.take("b", 5, timeout=10)) == b"other"
            assert bytes(first) == b"first"
            del first

    def test_many_sources_at_once(self) -> None:
        landing = self.landing()
        barrier = threading.Barrier(8)

        def source(index: int) -> None:
            sending = self.sending(landing.offer)
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

    def test_what_does_not_come_is_told_at_the_deadline(self) -> None:
        with self.pair() as (landing, _), pytest.raises(LinkError, match=r"m/0: did not come within 0\.05 s"):
            landing.take("m/0", 4, timeout=0.05)

    def test_another_length_is_refused(self) -> None:
        with self.pair() as (landing, sending):
            send(sending, "m/0", b"abc")
            with pytest.raises(LinkError, match="has 3 bytes, not 4"):
                landing.take("m/0", 4, timeout=10)

    def test_closing_wakes_who_waits(self) -> None:
        landing = self.landing()
        with ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(landing.take, "m/0", 4, timeout=100)
            landing.close()
            with pytest.raises(LinkError, match="is closed"):
                waiting.result()

    def test_a_closed_landing_ends_its_sendings(self) -> None:
        landing = self.landing()
        sending = self.sending(landing.offer)
        send(sending, "m/0", b"abc")
        landing.close()
        with pytest.raises(LinkError):
            sending.room(4)
        sending.close()

    def test_memory_of_the_destination_is_bounded(self) -> None:
        landing = self.landing(most_bytes=1 << 20, seconds=0.3)
        sending = self.sending(landing.offer, seconds=0.3)
        with pytest.raises(LinkError):  # noqa: PT012 over some links the source notices one range later
            for number in range(40):
                send(sending, f"m/{number}", pattern(300_000))
        sending.close()
        landing.close()
