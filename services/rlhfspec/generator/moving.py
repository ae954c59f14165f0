"""Samples that go on at another generator, and those that come from one, while the engine works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count

from rlhfspec.errors import MalformedRecord
from rlhfspec.migration.base import Peer
from rlhfspec.migration.mover import Mover
from rlhfspec.records import Move, Moved, WorkerInfo
from rlhfspec.service.bus import Inbox, StageBus
from rlhfspec.service.tasks import together

PULL_SECONDS = 0.5
LEAVE_SECONDS = 4.0  # for all that runs here to go on elsewhere


@dataclass(frozen=True, slots=True)
class Luggage:
    """What goes with a sample beside what its engine knows of it.

    >>> Luggage.read(Luggage(b"record", {"traceparent": "00-ab-cd-01"}, 1.5).to_bytes())
    Luggage(record=b'record', headers={'traceparent': '00-ab-cd-01'}, seconds=1.5)
    """

    record: bytes  # its prompt
    headers: Mapping[str, str]
    seconds: float  # of engines, so far

    def to_bytes(self) -> bytes:
        return json.dumps([dict(self.headers), self.seconds]).encode() + b"\n" + self.record

    @classmethod
    def read(cls, data: bytes) -> Luggage:
        head, _, record = data.partition(b"\n")
        try:
            headers, seconds = json.loads(head)
        except (ValueError, TypeError, RecursionError) as error:
            raise MalformedRecord(f"no luggage of a sample: {error}") from error
        are_texts = isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())
        if not (are_texts and isinstance(seconds, float) and 0 <= seconds < float("inf")):
            raise MalformedRecord("no luggage of a sample: must be headers and seconds")
        return cls(record, headers, seconds)


class Moving:
    """Follows the rebalancer's advice; knows the other generators by what they say of themselves."""

    def __init__(self, bus: StageBus, mover: Mover, job: str) -> None:
        self.mover = mover
        self._bus = bus
        self._job = job
        self._peers: dict[int, Peer] = {}
        self._moves: set[asyncio.Task[Moved]] = set()
        self._numbers = count()

    async def run(self, stopping: asyncio.Event) -> None:
        async with await self._bus.subscribe(Move) as advice, await self._bus.subscribe(WorkerInfo) as infos:
            await together(self._follow(advice, stopping), self._meet(infos, stopping))

    async def leave(self, samples: Collection[str]) -> None:
        """All of them go on elsewhere, as far as others have room and the time lasts."""
        workers = sorted(self._peers)
        leaving = [self._away(sample, _from(workers, place)) for place, sample in enumerate(samples)]
        tasks = {asyncio.create_task(part) for part in leaving} | self._moves
        if tasks:
            await asyncio.wait(tasks, timeout=LEAVE_SECONDS)
        await self.mover.close()

    async def _follow(self, inbox: Inbox[Move], stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            for delivery in await inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS):
                move = delivery.record
                if move.source == self._bus.worker and move.destination in self._peers:
                    self._begin(move)

    async def _meet(self, inbox: Inbox[WorkerInfo], stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            for delivery in await inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS):
                info = delivery.record
                if info.stage == self._bus.stage.name and info.worker != self._bus.worker:
                    name = f"{info.stage}-{info.worker}"
                    self._peers[info.worker] = Peer(
                        name=name, address=info.moves_address or info.id, incarnation=info.id
                    )

    async def _away(self, sample: str, workers: list[int]) -> None:
        for worker in workers:
            name = f"{self._job}/leave/{self.mover.incarnation}/{next(self._numbers)}"
            moved = await self._begin(
                Move(
                    id=name,
                    job=self._job,
                    sample_id=sample,
                    source=self._bus.worker,
                    destination=worker,
                    gain_seconds=0.0,
                    reason="its generator leaves",
                ),
                must_go=True,
            )
            if moved.how != "kept":
                return

    def _begin(self, move: Move, *, must_go: bool = False) -> asyncio.Task[Moved]:
        task = asyncio.create_task(self._move(move, must_go))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        return task

    async def _move(self, move: Move, must_go: bool) -> Moved:
        moved = await self.mover.move(move, self._peers[move.destination], must_go=must_go)
        await self._bus.publish(moved)
        return moved


def _from(workers: list[int], place: int) -> list[int]:
    """All of them, another first each time.

    >>> _from([0, 2, 5], 4)
    [2, 5, 0]
    """
    first = place % len(workers) if workers else 0
    return workers[first:] + workers[:first]
