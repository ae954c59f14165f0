"""Mover of sequences between this generator and others while both run."""

from __future__ import annotations

import asyncio
import itertools

from rlhfspec.engine.base import MovableByTokens
from rlhfspec.messages.records import Move, Moved
from rlhfspec.messages.transport.clock import Clock, SystemClock
from rlhfspec.moves.migration.base import Custody, MoveControl, Peer
from rlhfspec.moves.migration.engine_calls import EngineCalls, EngineStopped
from rlhfspec.moves.migration.giving import Giving, MoveContext
from rlhfspec.moves.migration.links.opening import Links
from rlhfspec.moves.migration.source import STAYS, MoveSource
from rlhfspec.moves.migration.taking import Taking

MAX_OUTGOING_MOVES = 4  # outgoing at once; others wait
_LAST_NOTIFICATIONS_SECONDS = 0.5  # for pending notifications


class Mover:
    """Source and destination of a generator's moves."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        engine: MovableByTokens,
        calls: EngineCalls,
        control: MoveControl,
        links: Links,
        custody: Custody,
        clock: Clock | None = None,
    ) -> None:
        self.name, self.incarnation, self.engine = name, incarnation, engine
        self._clock = clock or SystemClock()
        self._taking = Taking(incarnation, engine, calls, links, custody, self._clock)
        self._place = MoveContext(
            engine=engine, calls=calls, control=control, links=links, custody=custody, clock=self._clock
        )
        self.costs = self._place.costs
        self._numbers = itertools.count(1)
        self._free = asyncio.Semaphore(MAX_OUTGOING_MOVES)
        self._giving: dict[str, Giving] = {}  # by sample
        self._tasks: set[asyncio.Task[Moved]] = set()
        self._is_closed = False

    @property
    def moving(self) -> frozenset[str]:
        """Return the arriving and leaving samples, whose prompts must not start here."""
        return self._taking.arriving | self._giving.keys()

    async def move(self, move: Move, peer: Peer, *, must_go: bool = False, prefilled: bool = False) -> Moved:
        """Move a sequence, even if the caller is cancelled. If KV cannot move: send tokens if `must_go`, else stay.

        With `prefilled` it goes once its whole prompt is prefilled here, however long its KV takes.
        """
        reason = self._why_not(move)
        if reason:
            return _kept(move, reason)
        machine = MoveSource(
            move.id, move.sample_id, source=self.incarnation, destination=peer.incarnation, numbers=self._numbers,
            must_go=must_go,
        )  # fmt: skip
        giving = Giving(move, peer, machine, self._place, must_go=must_go, prefilled=prefilled)
        self._giving[move.sample_id] = giving
        task = asyncio.create_task(self._run(giving, move))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def begun(self) -> list[str]:
        views = await self._place.calls.call(self.engine.sequences)
        return [each.id for each in views if each.num_generated or not each.is_waiting]

    async def answer(self, data: bytes) -> bytes:
        return await self._taking.answer(data)

    async def refuse(self) -> None:
        """Refuse arrivals; local sequences may still leave, but no prompt is prefilled any more."""
        for giving in self._giving.values():
            giving.hurry()
        await self._taking.refuse()

    async def close(self) -> None:
        """Refuse arrivals, end outgoing moves and close links, while the engine's thread still runs calls."""
        self._is_closed = True
        for giving in self._giving.values():
            giving.give_up("its generator is leaving")
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._taking.close()
        if self._place.parting:
            _, silent = await asyncio.wait(self._place.parting, timeout=_LAST_NOTIFICATIONS_SECONDS)
            for each in silent:
                each.cancel()
            await asyncio.gather(*silent, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._place.links.close)

    def _why_not(self, move: Move) -> str:
        if self._is_closed:
            return "this generator is leaving"
        if move.sample_id in self.moving:
            return "it is already being moved"
        if self._place.custody.prompt_of(move.sample_id) is None:
            return "it is not at this generator"
        may_leave = self._taking.machine.may_leave(move.sample_id, self._clock.now())
        return "" if may_leave else "it has just arrived, and its source has not released it yet"

    async def _run(self, giving: Giving, move: Move) -> Moved:
        try:
            async with self._free:
                return await giving.run()
        except EngineStopped:
            return _kept(move, "the engine has stopped")
        finally:
            del self._giving[move.sample_id]


def _kept(move: Move, reason: str) -> Moved:
    return Moved(
        id=move.id, job=move.job, sample_id=move.sample_id, source=move.source, destination=move.destination,
        how="kept", reason=reason, code=STAYS,
    )  # fmt: skip
