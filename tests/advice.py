"""Stand-ins for a run's rebalancer, which listen to its generators and advise moves."""

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

from rlhfspec.errors import RLHFSpecError
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import Load, Move, Moved
from rlhfspec.stage.bus import Bus

ROLE = "rebalancer"
LISTEN_SECONDS = 0.02


class Listener:
    """Listener without advice. `file`: RUN/processes/connections.json, read again after a restart."""

    def __init__(self, file: Path) -> None:
        self.loads: dict[int, Load] = {}  # the last of each worker
        self.num_tokens: dict[str, int] = {}  # that each process generated, by its incarnation
        self.outcomes: Counter[str] = Counter()
        self.moved: list[Moved] = []
        self.num_advised = 0
        self._file = file
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        self._thread.join()

    def advice(self, job: str) -> list[Move]:
        return []

    def heard(self, moved: Moved) -> None:
        self.moved.append(moved)
        self.outcomes[moved.how] += 1

    async def _listen(self) -> None:
        """Listen to each start of the run in turn, as a transport waits long for a server that is gone."""
        uid = ""
        listening: asyncio.Task[None] | None = None
        while not self._leaving.is_set():
            with suppress(RLHFSpecError, OSError):  # there is no run right now
                connections = Connections.read(self._file)
                if connections.uid != uid or listening is None or listening.done():
                    await _end(listening)
                    uid = connections.uid
                    listening = asyncio.create_task(self._while_it_runs(connections))
            await asyncio.sleep(0.1)
        await _end(listening)

    async def _while_it_runs(self, connections: Connections) -> None:
        job = connections.job()
        transport = await connect(connections, ROLE, name="listener")
        self.loads.clear()
        bus = Bus(transport, job.metadata.name, uid=connections.uid, workers=workers_of(job))
        stage = bus.of(ROLE)
        try:
            async with await stage.subscribe(Load) as loads, await stage.subscribe(Moved) as moves:
                while True:
                    for load in await loads.pull(max_records=256, timeout_seconds=LISTEN_SECONDS):
                        self.loads[load.record.worker] = load.record
                        self.num_tokens[load.record.incarnation] = load.record.num_tokens
                    for moved in await moves.pull(max_records=4096, timeout_seconds=0.0):
                        self.heard(moved.record)
                    for move in self.advice(bus.job):
                        await stage.publish(move)
                        self.num_advised += 1
        finally:
            with suppress(AttributeError, TimeoutError):  # its library's, where the connection was lost a moment ago
                await asyncio.wait_for(transport.close(), 2.0)


async def _end(listening: asyncio.Task[None] | None) -> None:
    if listening is not None:
        listening.cancel()
        for error in await asyncio.gather(listening, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError | RLHFSpecError | OSError):
                raise error


class Adviser(Listener):
    def __init__(self, file: Path, seed: int, *, every_seconds: float = 0.05) -> None:
        super().__init__(file)
        self.under_way: dict[str, tuple[float, Move]] = {}  # advised when, and not told of; the last one last
        self._every = every_seconds
        self._draw = random.Random(seed)
        self._names = count()
        self._next = 0.0
        self._places: dict[str, int] = {}  # of what moved since its generator last said what it has

    def advice(self, job: str) -> list[Move]:
        if time.monotonic() < self._next or (move := self._move(job)) is None:
            return []
        self._next = time.monotonic() + self._every
        self.under_way[move.id] = (time.monotonic(), move)
        while len(self.under_way) > 8:  # lost
            del self.under_way[next(iter(self.under_way))]
        return [move]

    def heard(self, moved: Moved) -> None:
        super().heard(moved)
        self.under_way.pop(moved.id, None)
        if moved.how in ("kv", "tokens"):
            self._places[moved.sample_id] = moved.destination
        while len(self._places) > 1024:
            del self._places[next(iter(self._places))]

    def _move(self, job: str) -> Move | None:
        at = {sample: load.worker for load in list(self.loads.values()) for sample in load.sample_ids}
        at |= {sample: worker for sample, worker in self._places.items() if sample in at}
        if not at or len(self.loads) < 2:
            return None
        sample = self._draw.choice(sorted(at))
        other = self._draw.choice([worker for worker in self.loads if worker != at[sample]])
        return Move(
            id=f"{job}/random/{next(self._names)}", job=job, sample_id=sample, source=at[sample], destination=other,
            gain_seconds=1e9, reason="at random",
        )  # fmt: skip
