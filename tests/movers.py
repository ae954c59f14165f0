"""Generators in one process: real engines with threads, movers and a custody that checks ownership."""

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from moving import Bits, bits, drain, make, request

from rlhfspec.engine import Completion, Engine
from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Move, Moved
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.control import DirectControl
from rlhfspec.moves.migration.engine_calls import EngineCalls
from rlhfspec.moves.migration.links.opening import Links, make_landing, open_sending
from rlhfspec.moves.migration.mover import Mover
from rlhfspec.telemetry.base import SampleProgress

_ids = itertools.count()
LONG = {"max_context": 448, "speculation": "off"}  # long enough for whatever happens meanwhile
TOKENS = 400


@functools.cache
def alone(seed: int) -> Bits:
    engine = make(**LONG)
    engine.submit(request("x", seed=seed, max_tokens=TOKENS))
    return bits(drain(engine)["x"])


class Held:
    def __init__(self) -> None:
        self.prompts: dict[str, tuple[bytes, str]] = {}
        self.lost: list[str] = []
        self.num_taken = self.num_refused = 0
        self.came_with: dict[str, list[SampleProgress]] = {}
        self.left_with: dict[str, list[SampleProgress]] = {}

    def prompt_of(self, sample_id: str) -> tuple[bytes, str] | None:
        return self.prompts.get(sample_id)

    async def taken(self, sample_id: str, prompt: bytes, token: str) -> None:
        if prompt != f"prompt of {sample_id}".encode():
            raise MalformedRecord("the prompt of another one")
        assert sample_id not in self.prompts
        self.prompts[sample_id] = (prompt, token)
        self.num_taken += 1

    def arrived(self, sample_id: str, progress: SampleProgress) -> None:
        self.came_with.setdefault(sample_id, []).append(progress)

    def given(self, sample_id: str, progress: SampleProgress | None) -> None:
        del self.prompts[sample_id]
        if progress is None:
            self.num_refused += 1
        else:
            self.left_with.setdefault(sample_id, []).append(progress)

    def forgotten(self, sample_id: str, progress: SampleProgress) -> None:
        del self.prompts[sample_id]
        self.lost.append(sample_id)


class Generator:
    def __init__(self, name: str, engine: Engine, control: Any, *, kind: str = "memory", **parts: Any) -> None:
        self.name, self.engine = name, engine
        self.peer = Peer(name=name, address=name, incarnation=f"{name}-{next(_ids)}")
        self.custody = Held()
        self.finished: dict[str, Completion] = {}
        self.steps = 0
        self._news = threading.Event()
        self._stopped = False
        self.calls = EngineCalls(on_call=self._news.set)
        links = parts.pop("links", None) or Links(make_landing(kind), open_sending)
        self.mover = Mover(name, self.peer.incarnation, engine, self.calls, control, links, self.custody, **parts)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name=name)
        self.changed = asyncio.Event()

    def start(self) -> None:
        self._thread.start()

    async def submit(self, name: str, **params: Any) -> None:
        self.custody.prompts[name] = (f"prompt of {name}".encode(), f"token of {name}")
        await self.calls.call(lambda: self.engine.submit(request(name, **params)))

    async def move(self, name: str, to: "Generator | Peer", *, gain: float = 1e9, **options: Any) -> Moved:
        peer = to.peer if isinstance(to, Generator) else to
        move = Move(
            id=f"move-{next(_ids)}", job="job", sample_id=name, source=0, destination=1, gain_seconds=gain, reason=""
        )
        return await self.mover.move(move, peer, **options)

    def forget(self, name: str) -> None:
        """Forget a sample with its prompt. Call it in the engine's thread."""
        self._loop.call_soon_threadsafe(self.custody.prompts.pop, name, None)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    async def length(self, name: str) -> int:
        views = await self.calls.call(self.engine.sequences)
        return next((view.num_held for view in views if view.id == name), 0)

    async def stop(self) -> None:
        self._stopped = True
        self._news.set()
        await asyncio.to_thread(self._thread.join)
        self.calls.close()

    def _work(self) -> None:
        while not self._stopped:
            self.calls.run()
            if self.engine.has_work:
                self._loop.call_soon_threadsafe(self._stepped, self.engine.step().finished)
            elif not self.calls.waiting:
                self._news.wait(10)
                self._news.clear()

    def _stepped(self, finished: tuple[Completion, ...]) -> None:
        for done in finished:
            assert done.id in self.custody.prompts, "nobody kept its prompt in progress"
            del self.custody.prompts[done.id]
            self.finished[done.id] = done
        self.steps += 1
        self.changed.set()


@contextlib.asynccontextmanager
async def generators(
    count: int = 2, *, control: Any = None, kind: str = "memory", links: Any = None, **options: Any
) -> AsyncIterator[list[Generator]]:
    control = control or DirectControl()
    made = [
        Generator(f"g{index}", make(**options), control, kind=kind, **({"links": links(index)} if links else {}))
        for index in range(count)
    ]
    for each in made:
        control.serve(each.name, each.mover.answer)
        each.start()
    try:
        yield made
        for each in made:
            await each.until(lambda each=each: not each.engine.has_work)  # type: ignore[misc]
    finally:
        await asyncio.gather(*(each.mover.close() for each in made))
        await asyncio.gather(*(each.stop() for each in made))
    for each in made:
        assert_clean(each)


def assert_clean(generator: Generator) -> None:
    engine = generator.engine
    engine.check_integrity()
    assert not engine.scheduler.away
    assert not engine.scheduler.arriving
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert not generator.custody.prompts
    assert not generator.mover.moving


def all_bits(made: list[Generator]) -> dict[str, Bits]:
    """Return each sample's bits; each must be finished once."""
    found: dict[str, Bits] = {}
    for each in made:
        assert not found.keys() & each.finished.keys(), "finished twice"
        found |= {name: bits(done) for name, done in each.finished.items()}
    return found
