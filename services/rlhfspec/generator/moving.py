"""Samples that go on at another generator, and those that come from one, while the engine works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from google.protobuf.message import DecodeError

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Move, Moved, WorkerInfo
from rlhfspec.messages.wire import records_pb2
from rlhfspec.messages.wire.fields import read, write
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.mover import Mover
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.tasks import together

_LEAVE_SECONDS = 3.5  # for all that runs here to go on elsewhere
_AGAIN_SECONDS = 0.02  # then one that had no place for it is asked again
MOST_ADVICE = 32  # followed at once; the rest of a flood is lost, as advice may be


@dataclass(frozen=True, slots=True)
class MovedPrompt:
    """What goes with a sample beside what its engine knows of it.

    >>> MovedPrompt.read(MovedPrompt(b"record", {"traceparent": "00-ab-cd-01"}, 1.5).to_bytes())
    MovedPrompt(record=b'record', headers={'traceparent': '00-ab-cd-01'}, seconds=1.5)
    """

    record: bytes  # its prompt
    headers: Mapping[str, str]
    seconds: float  # of engines, so far

    def to_bytes(self) -> bytes:
        message = records_pb2.MovedPrompt()
        write(message, self)
        return message.SerializeToString()

    @classmethod
    def read(cls, data: bytes) -> MovedPrompt:
        """Raises MalformedRecord."""
        try:
            moved = read(records_pb2.MovedPrompt.FromString(data), cls)
        except DecodeError as error:
            raise MalformedRecord(f"no moved prompt: {error}") from error
        if not 0 <= moved.seconds < float("inf"):
            raise MalformedRecord(f"no moved prompt: {moved.seconds} seconds")
        return moved


class Moving:
    """Follows the rebalancer's advice; knows the other generators by what they say of themselves."""

    def __init__(self, generator: Service, bus: StageBus, mover: Mover, job: str) -> None:
        self.mover = mover
        self._generator = generator
        self._bus = bus
        self._job = job
        self._peers: dict[int, Peer] = {}
        self._moves: set[asyncio.Task[Moved]] = set()
        self._numbers = count()
        self._error: BaseException | None = None  # of a move: one that was not foreseen ends this worker
        self._failed = asyncio.Event()  # there is one

    async def run(self) -> None:
        async with await self._bus.subscribe(Move) as advice, await self._bus.subscribe(WorkerInfo) as infos:
            await together(self._follow(advice), self._meet(infos))

    async def leave(self, begun: Callable[[], Awaitable[list[str]]]) -> None:
        """What has begun here goes on elsewhere, as far as others take it and the time lasts. One that leaves too, or
        says nothing, is asked once: when a whole run ends no worker waits for another."""
        await self.mover.refuse()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                turn = 0
                while ((samples := await begun()) and self._peers) or self._moves:
                    workers = sorted(self._peers)
                    going = enumerate(samples if workers else (), turn)
                    await asyncio.gather(*(self._away(each, workers[n % len(workers)]) for n, each in going))
                    await asyncio.sleep(_AGAIN_SECONDS)
                    turn += 1
        await self.mover.close()

    async def _follow(self, inbox: Inbox[Move]) -> None:
        while not self._generator.stopping.is_set():
            if self._error is not None:
                raise self._error
            pulling = inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS)
            for delivery in await self._generator.unless_stopped(pulling, self._failed):
                move = delivery.record
                is_ours = move.source == self._bus.worker and move.destination in self._peers
                if is_ours and len(self._moves) < MOST_ADVICE:
                    self._begin(move)

    async def _meet(self, inbox: Inbox[WorkerInfo]) -> None:
        while not self._generator.stopping.is_set():
            pulling = inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS)
            for delivery in await self._generator.unless_stopped(pulling):
                info = delivery.record
                if info.stage == self._bus.stage.name and info.worker != self._bus.worker:
                    name = f"{info.stage}-{info.worker}"
                    self._peers[info.worker] = Peer(
                        name=name, address=info.moves_address or info.id, incarnation=info.id
                    )

    async def _away(self, sample: str, worker: int) -> None:
        if (peer := self._peers.get(worker)) is None:
            return
        move = Move(
            id=f"{self._job}/leave/{self.mover.incarnation}/{next(self._numbers)}",
            job=self._job,
            sample_id=sample,
            source=self._bus.worker,
            destination=worker,
            gain_seconds=0.0,
            reason="its generator leaves",
        )
        moved = await self._begin(move, must_go=True)
        if moved.how == "kept" and moved.reason.startswith(("leaving", "the destination is no more", peer.address)):
            self._peers.pop(worker, None)

    def _begin(self, move: Move, *, must_go: bool = False) -> asyncio.Task[Moved]:
        task = asyncio.create_task(self._move(move, must_go))
        self._moves.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Moved]) -> None:
        self._moves.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()
            if self._error is not None:
                self._failed.set()

    async def _move(self, move: Move, must_go: bool) -> Moved:
        moved = await self.mover.move(move, self._peers[move.destination], must_go=must_go)
        await self._bus.publish(moved)
        return moved
