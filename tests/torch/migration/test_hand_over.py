"""A prefill worker hands its samples over to the decoders that have room, as far as it knows."""

import asyncio
from typing import Any

import pytest
from loads import a_load
from small_job import JOB

from rlhfspec.engine.base import SequenceView
from rlhfspec.generator.moving import OwnMoves
from rlhfspec.messages.records import Move, Moved, WorkerInfo
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.moves.migration.source import GONE, SILENT, STAYS
from rlhfspec.stage.bus import Bus


class RefusingMover:
    incarnation = "source"
    moving: frozenset[str] = frozenset()

    def __init__(self, code: str) -> None:
        self.code = code
        self.asked: list[tuple[str, int]] = []

    async def move(self, move: Move, peer: object, **options: bool) -> Moved:
        self.asked.append((move.sample_id, move.destination))
        return Moved(
            id=move.id, job=JOB, sample_id=move.sample_id, source=0, destination=move.destination, how="kept",
            code=self.code,
        )  # fmt: skip


class HandingOver:
    """Worker 0, which prefills for two decoders."""

    def __init__(self, bus: Bus, clock: FakeClock, code: str) -> None:
        self.clock, self.mover = clock, RefusingMover(code)
        mover: Any = self.mover
        self.moves = OwnMoves(bus.of("generator"), mover, asyncio.Event(), job=JOB, num_prefilling=1)
        for worker in (1, 2):
            self.met(worker, "a")

    @classmethod
    async def to_two(cls, code: str = "room") -> "HandingOver":
        clock = FakeClock()
        workers = {"generator": 3}
        return cls(await Bus.open(MemoryTransport(clock=clock), JOB, workers=workers, clock=clock), clock, code)

    def met(self, worker: int, process: str) -> None:
        self.moves.meet(
            WorkerInfo(
                id=f"{worker}/{process}", job=JOB, stage="generator", worker=worker, host="host", pid=1,
                grpc_address="", http_address="",
            )
        )  # fmt: skip

    async def over(self, *samples: SequenceView) -> list[tuple[str, int]]:
        """Return the samples that begin to move, each with its decoder."""
        self.mover.asked.clear()
        self.moves.hand_over(samples, 0)
        for _ in range(9):
            await asyncio.sleep(0)
        self.moves.settle()
        return list(self.mover.asked)


def a_view(name: str, *, num_held: int = 20, num_prefill: int = 0) -> SequenceView:
    return SequenceView(id=name, num_generated=0, num_held=num_held, num_prefill=num_prefill, is_waiting=False)


async def test_a_silent_or_replaced_decoder_gets_nothing() -> None:
    over = await HandingOver.to_two()
    over.moves.loaded(a_load(1, [], num_free_rows=99))
    await over.clock.advance(1.5)
    over.moves.loaded(a_load(2, [], num_free_rows=9))
    assert await over.over(a_view("x")) == [("x", 1)]
    over.moves.loaded(a_load(1, [], num_free_rows=99))
    over.met(1, "b")
    assert await over.over(a_view("x")) == [("x", 2)]
    over.moves.loaded(a_load(1, [], num_free_rows=1))
    await over.clock.advance(2.1)
    assert await over.over(a_view("x")) == []


@pytest.mark.parametrize(
    ("code", "is_asked_again"), [("room", False), (GONE, False), (SILENT, False), ("waits", True), (STAYS, True)]
)
async def test_only_a_decoder_that_refused_or_was_silent_counts_as_full(code: str, is_asked_again: bool) -> None:
    over = await HandingOver.to_two(code)
    over.moves.loaded(a_load(1, []))
    assert await over.over(a_view("x"))
    assert bool(await over.over(a_view("x"))) == is_asked_again


async def test_a_long_sample_holds_up_no_shorter_ones_and_only_the_prompt_in_turn_goes_early() -> None:
    over = await HandingOver.to_two()
    over.moves.loaded(a_load(1, [], num_free_tokens=100))
    prompts = [a_view(f"prompt {number}", num_prefill=10) for number in range(2)]
    long = [a_view(f"long {number}", num_held=101) for number in range(5)]
    assert await over.over(*prompts, *long, a_view("x")) == [("x", 1), ("prompt 0", 1)]
