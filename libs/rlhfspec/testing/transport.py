"""Contract of transports (`rlhfspec.messages.transport.base.Transport`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rlhfspec.errors import InvalidRequest, TransportClosed, TransportFull
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Message, Subscription
from rlhfspec.testing.transport_harness import DEAD, SUBJECT, TransportHarness, ids

Test = Callable[[TransportHarness], Coroutine[Any, Any, None]]


class TransportContract:
    """Test suite of a transport. Subclasses define `open`, which yields a new one with its clock."""

    def open(
        self, *, max_pending: int, publish_timeout_seconds: float
    ) -> AbstractAsyncContextManager[TransportHarness]:
        raise NotImplementedError

    def run(self, main: Test, *, max_pending: int = 100, publish_timeout_seconds: float = 5.0) -> None:
        async def opened() -> None:
            async with self.open(max_pending=max_pending, publish_timeout_seconds=publish_timeout_seconds) as harness:
                await main(harness)

        asyncio.run(opened())

    def test_messages_come_in_order_with_all_they_carry(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            assert await h.publish("a", "b", "c") == [True, True, True]
            messages = await h.now(reward)
            assert ids(messages) == ["a", "b", "c"]
            assert [m.data for m in messages] == [b"a", b"b", b"c"]
            assert {(m.subject, m.num_deliveries) for m in messages} == {(SUBJECT, 1)}

        self.run(main)

    def test_a_pull_waits_for_the_first_message_and_ends_at_its_timeout(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            assert await h.meanwhile(1.0, reward.pull(8, 0.5)) == []
            waiting = asyncio.create_task(reward.pull(8, 30.0))
            await h.advance(0.5)
            assert not waiting.done()
            await h.publish("a")
            await h.advance(0.5)
            assert ids(await asyncio.wait_for(waiting, 10)) == ["a"]

        self.run(main)

    def test_a_pull_takes_no_more_than_asked_for(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            await h.publish("a", "b", "c")
            assert ids(await h.now(reward, most=2)) == ["a", "b"]
            assert ids(await h.now(reward)) == ["c"]

        self.run(main)

    def test_one_name_competes_and_another_sees_everything(self) -> None:
        async def main(h: TransportHarness) -> None:
            first, second, late = await h.open("reward", "reward", "critic")
            await h.publish("a", "b", "c")
            shared = [ids(await h.now(first, most=1)), ids(await h.now(second)), ids(await h.now(first))]
            assert shared == [["a"], ["b", "c"], []]
            assert ids(await h.now(late)) == ["a", "b", "c"]

        self.run(main)

    def test_acknowledged_is_for_ever_and_for_this_name_only(self) -> None:
        async def main(h: TransportHarness) -> None:
            reward, critic = await h.open("reward", "critic", ack_wait_seconds=1.0)
            await h.publish("a")
            for message in await h.now(reward):
                await message.ack()
            await h.advance(2.0)
            assert await h.now(reward) == []
            assert ids(await h.now(critic)) == ["a"]

        self.run(main)

    def test_what_is_not_acknowledged_comes_again_oldest_first(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", ack_wait_seconds=2.0)
            await h.publish("a", "b")
            assert ids(await h.now(reward)) == ["a", "b"]
            await h.publish("c")
            await h.advance(2.5)
            again = await h.now(reward)
            assert [(m.id, m.num_deliveries) for m in again] == [("a", 2), ("b", 2), ("c", 1)]

        self.run(main)

    def test_a_waiting_pull_gets_what_another_worker_left(self) -> None:
        async def main(h: TransportHarness) -> None:
            dying, living = await h.open("reward", "reward", ack_wait_seconds=2.0)
            await h.publish("a")
            assert ids(await h.now(dying)) == ["a"]
            again = await h.meanwhile(2.5, living.pull(8, 30.0))
            assert [(m.id, m.num_deliveries) for m in again] == [("a", 2)]

        self.run(main)

    def test_in_progress_starts_the_deadline_anew(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", ack_wait_seconds=1.2)
            await h.publish("a")
            [message] = await h.now(reward)
            for _ in range(3):
                await h.advance(0.8)
                await message.in_progress()
            assert await h.now(reward) == []
            await h.advance(1.5)
            assert ids(await h.now(reward)) == ["a"]

        self.run(main)

    def test_nak_delivers_again_after_its_delay(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            await h.publish("a", "b")
            later, at_once = await h.now(reward)
            await later.nak(2.0)
            await at_once.nak()
            assert [(m.id, m.num_deliveries) for m in await h.now(reward)] == [("b", 2)]
            again = await h.meanwhile(2.5, reward.pull(8, 30.0))
            assert [(m.id, m.num_deliveries) for m in again] == [("a", 2)]

        self.run(main)

    def test_only_the_first_end_of_a_delivery_counts(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            await h.publish("a", "b")
            acked, naked = await h.now(reward)
            await acked.ack()
            await acked.nak()
            await acked.term("too late")
            await naked.nak()
            await naked.ack()
            await naked.in_progress()
            assert ids(await h.now(reward)) == ["b"]
            assert await h.now(await h.transport.watch(DEAD)) == []

        self.run(main)

    def test_a_late_acknowledgement_counts(self) -> None:
        async def main(h: TransportHarness) -> None:
            reward, _ = await h.open("reward", "critic", ack_wait_seconds=1.0)
            await h.publish("a", "b")
            late, again = await h.now(reward)
            await h.advance(1.5)
            await late.ack()
            [redelivered] = await h.now(reward)
            await again.ack()
            await redelivered.nak()
            await h.advance(1.5)
            assert await h.now(reward) == []

        self.run(main)

    def test_after_the_last_delivery_it_is_a_dead_letter(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", ack_wait_seconds=1.0, max_deliveries=2)
            watch = await h.transport.watch(DEAD)
            await h.publish("a", "b")
            silent, refused = await h.now(reward)
            await refused.nak()
            [refused] = await h.now(reward)
            await refused.nak()
            await h.advance(1.5)
            assert ids(await h.now(reward)) == [silent.id]
            letters = [dead_letters.decode(m.data) for m in await h.meanwhile(2.0, self._all_of(h, watch, 2))]
            assert [(le.id, le.consumer, le.subject, le.data) for le in letters] == [
                ("b", "reward", SUBJECT, b"b"),
                ("a", "reward", SUBJECT, b"a"),
            ]
            assert [le.num_deliveries for le in letters] == [2, 2]
            assert "refused" in letters[0].reason
            assert "no acknowledgement within 1 s" in letters[1].reason
            await h.advance(1.5)
            assert await h.now(reward) == []

        self.run(main)

    @staticmethod
    async def _all_of(h: TransportHarness, subscription: Subscription, num_messages: int) -> list[Message]:
        found: list[Message] = []
        while len(found) < num_messages:
            found += await subscription.pull(num_messages - len(found), 30.0)
        return found

    def test_dead_letters_come_by_themselves(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", ack_wait_seconds=1.0, max_deliveries=1)
            watch = await h.transport.watch(DEAD)
            watching = asyncio.create_task(watch.pull(1, 30.0))
            await h.advance(0.1)
            await h.publish("a")
            assert ids(await h.now(reward)) == ["a"]
            await h.advance(2.0)  # and no consumer pulls for reward
            [letter] = await asyncio.wait_for(watching, 10)
            assert dead_letters.decode(letter.data).id == "a"

        self.run(main)

    def test_term_goes_to_the_dead_letters_with_its_reason(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            await h.publish("a")
            [message] = await h.now(reward)
            await message.term("not a sample")
            assert await h.now(reward) == []
            watch = await h.transport.watch(DEAD)
            [letter] = await h.now(watch)
            assert dead_letters.decode(letter.data).reason == "not a sample"

        self.run(main)

    def test_an_id_is_published_once(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            assert await h.publish("a", "a") == [True, False]
            [message] = await h.now(reward)
            await message.ack()
            assert await h.publish("a") == [False]
            await h.transport.declare("rlhf.sums.prompt", "work")
            assert await h.transport.publish("rlhf.sums.prompt", b"", id="a"), "ids are unique per subject only"
            assert await h.now(reward) == []

        self.run(main)

    def test_a_consumer_holds_no_more_than_it_may(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", max_unacknowledged=2)
            await h.publish("a", "b", "c")
            held = await h.now(reward)
            assert ids(held) == ["a", "b"]
            waiting = asyncio.create_task(reward.pull(8, 30.0))
            await h.advance(0.5)
            assert not waiting.done()
            await held[0].ack()
            await h.advance(0.5)
            assert ids(await asyncio.wait_for(waiting, 10)) == ["c"]

        self.run(main)

    def test_publish_waits_for_room(self) -> None:
        async def main(h: TransportHarness) -> None:
            reward, critic = await h.open("reward", "critic")
            await h.publish("a", "b")
            waiting = asyncio.create_task(h.publish("c"))
            for message in await h.now(reward):
                await message.ack()
            await h.advance(0.5)
            assert not waiting.done(), "the critic has yet to acknowledge"
            await (await h.now(critic))[0].ack()
            await h.advance(0.5)
            assert await asyncio.wait_for(waiting, 10) == [True]

        self.run(main, max_pending=2)

    def test_publish_names_who_never_makes_room(self) -> None:
        async def main(h: TransportHarness) -> None:
            reward, _ = await h.open("reward", "critic")
            await h.publish("a", "b")
            for message in await h.now(reward):
                await message.ack()
            with pytest.raises(TransportFull, match="no room for 2 s: 2 messages are not yet acknowledged by critic"):
                await h.meanwhile(2.5, h.publish("c"))

        self.run(main, max_pending=2, publish_timeout_seconds=2.0)

    def test_what_is_declared_for_nobody_takes_no_room(self) -> None:
        async def main(h: TransportHarness) -> None:
            await h.open()
            assert await h.publish("a", "b", "c", "a") == [True, True, True, False]

        self.run(main, max_pending=2)

    def test_what_is_not_declared_is_refused(self) -> None:
        async def main(h: TransportHarness) -> None:
            with pytest.raises(InvalidRequest, match="was not declared"):
                await h.publish("a")
            await h.open("reward", ack_wait_seconds=1.0)
            with pytest.raises(InvalidRequest, match=r"was not declared for rlhf\.sums\.sample"):
                await h.transport.subscribe(SUBJECT, Consumer(name="critic"))
            with pytest.raises(InvalidRequest, match="was declared with"):
                await h.transport.subscribe(SUBJECT, Consumer(name="reward", ack_wait_seconds=2.0))
            await h.open("reward", ack_wait_seconds=1.0)  # the same declaration again
            with pytest.raises(InvalidRequest, match="was declared as work"):
                await h.open("reward", "critic", ack_wait_seconds=1.0)
            with pytest.raises(InvalidRequest, match="was declared as work"):
                await h.transport.declare(SUBJECT, "state")

        self.run(main)

    def test_headers_travel_along(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward")
            await h.transport.publish(SUBJECT, b"", id="a", headers={"traceparent": "00-ab-cd-01"})
            assert [dict(m.headers) for m in await h.now(reward)] == [{"traceparent": "00-ab-cd-01"}]

        self.run(main)

    def test_whoever_has_the_token_ends_the_delivery(self) -> None:
        async def main(h: TransportHarness) -> None:
            [reward] = await h.open("reward", ack_wait_seconds=1.2)
            await h.publish("a", "b")
            tokens = [message.token for message in await h.now(reward)]
            for subject, name in (("other", "reward"), (SUBJECT, "critic")):
                with pytest.raises(InvalidRequest, match="is not a delivery token"):
                    await h.transport.adopt(tokens[0], subject, name)
            kept, given_back = [await h.transport.adopt(token, SUBJECT, "reward") for token in tokens]
            await h.advance(0.8)
            await kept.in_progress()
            await given_back.nak()
            assert [(m.id, m.num_deliveries) for m in await h.now(reward)] == [("b", 2)]
            await h.advance(0.8)
            await kept.ack()
            await h.advance(1.5)
            assert ids(await h.now(reward)) == ["b"], "acknowledged for ever"

        self.run(main)

    def test_what_a_dead_worker_held_is_released_at_once(self) -> None:
        async def main(h: TransportHarness) -> None:
            dead, trainer = await h.open("trainer", "trainer", ack_wait_seconds=60.0, max_deliveries=None)
            await h.publish("a", "b")
            for number in range(2, 9):
                held = await h.now(dead)
                assert ids(held) == ["a", "b"]
                await h.transport.release(SUBJECT, "trainer")
                assert {m.num_deliveries for m in held} == {number - 1}, "deliveries are not limited"
            for message in await h.now(trainer):
                await message.ack()
            await h.transport.release(SUBJECT, "trainer")
            assert await h.now(trainer) == []

        self.run(main)

    def test_of_state_the_latest_of_each_key_is_seen_first(self) -> None:
        async def main(h: TransportHarness) -> None:
            await h.transport.declare(SUBJECT, "state")

            async def put(key: str, id: str) -> bool:
                return await h.transport.publish(SUBJECT, b"", id=id, key=key)

            early = await h.transport.watch(SUBJECT)
            assert [await put("policy", "p0"), await put("critic", "c0"), await put("policy", "p1")] == [True] * 3
            assert not await put("policy", "p1"), "a known id is not published again"
            late = await h.transport.watch(SUBJECT)
            assert sorted(ids(await h.now(late))) == ["c0", "p1"]
            assert ids(await h.now(early))[-1] == "p1"
            await put("critic", "c1")
            assert [ids(await h.now(one)) for one in (late, early)] == [["c1"], ["c1"]]

        self.run(main)

    def test_a_signal_is_for_whoever_watches_and_never_waits(self) -> None:
        async def main(h: TransportHarness) -> None:
            await h.transport.declare(SUBJECT, "signal")
            assert await h.publish("a", "b", "c") == [True, True, True], "nothing is kept without a watcher"
            one, slow = await h.transport.watch(SUBJECT), await h.transport.watch(SUBJECT)
            waiting = asyncio.create_task(one.pull(9, 30.0))
            await h.advance(0.1)
            assert await h.publish("a", "d") == [True, True], "signals are not de-duplicated"
            await h.advance(0.1)
            first = await asyncio.wait_for(waiting, 10)
            assert ids(first + await h.now(one)) == ["a", "d"]
            await h.publish("e", "f")
            await h.advance(0.1)
            assert ids(await h.now(slow)) == ["e", "f"], "a slow reader loses its oldest signals"

        self.run(main, max_pending=2, publish_timeout_seconds=1.0)

    def test_who_watches_work_owes_nothing(self) -> None:
        async def main(h: TransportHarness) -> None:
            await h.open("reward")
            await h.publish("before")
            view = await h.transport.watch(SUBJECT)
            await h.publish("a")
            [message] = await h.now(view)
            assert (message.id, message.token) == ("a", "")
            await message.nak()
            await message.term("nothing to end")
            assert await h.now(view) == []
            assert await h.now(await h.transport.watch(DEAD)) == []

        self.run(main)

    def test_closed_is_said(self) -> None:
        async def main(h: TransportHarness) -> None:
            one, other = await h.open("reward", "critic")
            await one.close()
            with pytest.raises(TransportClosed, match=SUBJECT):
                await one.pull(1, 1.0)
            waiting = asyncio.create_task(other.pull(1, 30.0))
            await h.advance(0.1)
            await h.transport.close()
            with pytest.raises(TransportClosed):
                await asyncio.wait_for(waiting, 10)
            with pytest.raises(TransportClosed):
                await h.publish("a")

        self.run(main)
