"""Someone who advises moves at random, as fast as asked for, in place of (or beside) a run's rebalancer."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from itertools import count
from typing import Self

from rlhfspec.errors import RLHFSpecError
from rlhfspec.loop import workers_of
from rlhfspec.records import Load, Move, Moved
from rlhfspec.servers.certificates import client_tls
from rlhfspec.service.bus import Bus
from rlhfspec.service.connections import Connections
from rlhfspec.service.rights import inbox_of
from rlhfspec.transport.nats import NatsTransport

ROLE = "rebalancer"


class Adviser:
    """Advises a move every `every_seconds`, of a sample that some generator said it has, to any other generator."""

    def __init__(self, connections: Connections, seed: int, *, every_seconds: float = 0.05) -> None:
        self.outcomes: Counter[str] = Counter()
        self.moved: list[Moved] = []
        self.num_advised = 0
        self._connections = connections
        self._every = every_seconds
        self._draw = random.Random(seed)
        self._loads: dict[int, Load] = {}
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._advise()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        self._thread.join()

    async def _advise(self) -> None:
        connections, job = self._connections, self._connections.job()
        folder = connections.credentials
        assert folder is not None
        while not self._leaving.is_set():
            transport = await NatsTransport.connect(
                connections.nats_url,
                name="adviser",
                inbox_prefix=inbox_of(ROLE),
                nkey_seed=folder / f"{ROLE}.seed",
                tls=client_tls(folder, ROLE),
            )
            try:
                await self._while_connected(
                    Bus(transport, job.metadata.name, uid=connections.uid, workers=workers_of(job))
                )
            except RLHFSpecError:
                await asyncio.sleep(self._every)  # its server was killed
            finally:
                await transport.close()

    async def _while_connected(self, bus: Bus) -> None:
        stage = bus.of(ROLE)
        async with await stage.subscribe(Load) as loads, await stage.subscribe(Moved) as moves:
            names = count(self.num_advised)
            while not self._leaving.is_set():
                for load in await loads.pull(max_records=256, timeout_seconds=self._every):
                    self._loads[load.record.worker] = load.record
                for moved in await moves.pull(max_records=256, timeout_seconds=0.0):
                    self.moved.append(moved.record)
                    self.outcomes[moved.record.how] += 1
                if (move := self._move(bus.job, f"random/{next(names)}")) is not None:
                    await stage.publish(move)
                    self.num_advised += 1

    def _move(self, job: str, name: str) -> Move | None:
        sources = [load for load in self._loads.values() if load.sample_ids]
        if not sources or len(self._loads) < 2:
            return None
        source = self._draw.choice(sources)
        other = self._draw.choice([worker for worker in self._loads if worker != source.worker])
        sample = self._draw.choice(source.sample_ids)
        return Move(
            id=f"{job}/{name}", job=job, sample_id=sample, source=source.worker, destination=other,
            gain_seconds=1e9, reason="at random",
        )  # fmt: skip
