"""Suites that need no torch see bugs: each of these implementations breaks one promise, and its test is red."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from rlhfspec.engine.drafting.base import Acceptance, DraftBatch, DraftPlan, Forest, LevelRule
from rlhfspec.engine.drafting.suffix import SuffixDrafter
from rlhfspec.messages.transport.base import Consumer, Subscription
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.testing.drafter import DrafterContract, DraftTable
from rlhfspec.testing.transport import TransportContract
from rlhfspec.testing.transport_harness import TransportHarness

RED = (AssertionError, pytest.fail.Exception)
NUMBERS = count()


class PublishesTwice(MemoryTransport):
    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        return await super().publish(subject, data, id=f"{id}#{next(NUMBERS)}", key=key, headers=headers)


class LosesHeaders(MemoryTransport):
    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        return await super().publish(subject, data, id=id, key=key)


class SubscribesToAnything(MemoryTransport):
    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        if subject in self._subjects:
            await self.declare(subject, "work", [consumer])
        return await super().subscribe(subject, consumer)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (PublishesTwice, "test_an_id_is_published_once"),
        (LosesHeaders, "test_headers_travel_along"),
        (SubscribesToAnything, "test_what_is_not_declared_is_refused"),
    ],
)
def test_a_broken_transport_is_seen(broken: type[MemoryTransport], test: str) -> None:
    class Suite(TransportContract):
        @asynccontextmanager
        async def open(self, *, max_pending: int, publish_timeout_seconds: float) -> AsyncIterator[TransportHarness]:
            clock = FakeClock()
            options = {"max_pending": max_pending, "publish_timeout_seconds": publish_timeout_seconds}
            yield TransportHarness(broken(clock=clock, **options), clock)

    with pytest.raises(RED):
        getattr(Suite(), test)()


class TooDeep(SuffixDrafter):
    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        return super().propose(replace(batch, room=batch.room + 5), plan, acceptance, rule)


class ChildrenFirst(SuffixDrafter):
    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        forest = super().propose(batch, plan, acceptance, rule)
        return replace(forest, parent=np.where(forest.parent >= 0, forest.size - 1, forest.parent).astype(np.int32))


class SameSiblings(SuffixDrafter):
    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        forest = super().propose(batch, plan, acceptance, rule)
        return replace(forest, token=np.zeros_like(forest.token))


class Moody(SuffixDrafter):
    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        forest = super().propose(batch, plan, acceptance, rule)
        return replace(forest, token=forest.token + np.int32(next(NUMBERS)))


class UnderAnotherName(SuffixDrafter):
    name = "other"


class Mute(SuffixDrafter):
    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        return super().propose(batch, plan, acceptance, rule).take(np.empty(0, np.int32))


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (TooDeep, "test_trees_are_well_formed_and_no_deeper_than_plan_and_room"),
        (TooDeep, "test_a_token_of_room_is_the_verifications"),
        (ChildrenFirst, "test_trees_are_well_formed_and_no_deeper_than_plan_and_room"),
        (SameSiblings, "test_trees_are_well_formed_and_no_deeper_than_plan_and_room"),
        (Moody, "test_what_it_proposes_depends_on_its_calls_alone"),
        (UnderAnotherName, "test_acceptance_is_asked_under_the_drafters_name"),
        (Mute, "test_something_is_drafted_for_a_text_that_repeats_itself"),
    ],
)
def test_a_broken_drafter_is_seen(broken: type[SuffixDrafter], test: str) -> None:
    class Suite(DrafterContract):
        def make(self, table: DraftTable) -> SuffixDrafter:
            return broken()

    with pytest.raises(RED):
        getattr(Suite(), test)()
