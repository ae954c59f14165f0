"""Measure latency and throughput of records between processes: `python bench/transport.py`.

One local nats-server keeps streams in files; clients have their own processes. A trip lasts from just before `publish`
until delivery or the confirmed acknowledgement in another process. Rates come with CPU time, which other load changes
little.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rlhfspec.messages.servers.nats import NatsServer
from rlhfspec.messages.transport.base import Consumer
from rlhfspec.messages.transport.nats import NatsTransport

SUBJECT = "rlhf.bench.sample"
READER = Consumer(name="reader", ack_wait_seconds=60.0, max_unacknowledged=1 << 16)
TRIP_BYTES, NUM_TRIPS, TRIP_EVERY_SECONDS = (2_000, 16_000), 1000, 0.01
FLOW_BYTES, NUM_RECORDS, IN_FLIGHT = (1_000, 8_000), 40_000, 256
CLIENTS = (1, 2)  # processes that publish, and as many that read


class Span(NamedTuple):
    began: float
    ended: float
    computed: float  # seconds of processor time


async def connect(url: str, name: str) -> NatsTransport:
    return await NatsTransport.connect(url, name=name, max_pending=1 << 20)


async def send_trips(url: str, num_bytes: int) -> None:
    transport = await connect(url, "sender")
    for number in range(NUM_TRIPS):
        await asyncio.sleep(TRIP_EVERY_SECONDS)
        now = struct.pack("d", time.monotonic())  # one clock for all processes of a machine
        await transport.publish(SUBJECT, now.ljust(num_bytes, b"!"), id=f"{num_bytes}/{number}")
    await transport.close()


async def time_trips(url: str, num_bytes: int) -> list[tuple[float, float]]:
    """Return for each record the ms until delivery, and until acknowledgement."""
    transport = await connect(url, "reader")
    reading = await transport.subscribe(SUBJECT, READER)
    times: list[tuple[float, float]] = []
    while len(times) < NUM_TRIPS:
        for message in await reading.pull(16, 10.0):
            in_hand, [sent] = time.monotonic(), struct.unpack("d", message.data[:8])
            await message.ack()
            times.append((1e3 * (in_hand - sent), 1e3 * (time.monotonic() - sent)))
    await transport.close()
    return times


async def send_many(url: str, num_bytes: int, part: str, num_records: int) -> Span:
    transport = await connect(url, "sender")
    data, room = bytes(num_bytes), asyncio.Semaphore(IN_FLIGHT)

    async def send(number: int) -> None:
        async with room:
            await transport.publish(SUBJECT, data, id=f"{part}/{number}")

    began, computed = time.monotonic(), time.process_time()
    await asyncio.gather(*(send(number) for number in range(num_records)))
    span = Span(began, time.monotonic(), time.process_time() - computed)
    await transport.close()
    return span


async def read_many(url: str, num_records: int) -> Span:
    transport = await connect(url, "reader")
    reading = await transport.subscribe(SUBJECT, READER)
    num_read, began, ended, computed = 0, 0.0, 0.0, time.process_time()
    while num_read < num_records and (messages := await reading.pull(IN_FLIGHT, 30.0 if began == 0.0 else 3.0)):
        began = began or time.monotonic()
        await asyncio.gather(*(message.ack() for message in messages))
        num_read += len(messages)
        ended = time.monotonic()
    await transport.close()
    return Span(began, ended, time.process_time() - computed)


def in_process(work: Callable[..., Coroutine[Any, Any, Any]], *arguments: object) -> Any:
    return asyncio.run(work(*arguments))


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p90": round(cuts[89], 2), "p99": round(cuts[98], 2)}


def figures(spans: list[Span], server_seconds: float) -> dict[str, object]:
    began, ended = min(span.began for span in spans), max(span.ended for span in spans)
    microseconds = 1e6 / NUM_RECORDS
    return {
        "rate": round(NUM_RECORDS / (ended - began)),
        "client us": round(microseconds * sum(span.computed for span in spans)),
        "server us": round(microseconds * server_seconds),
    }


def computed_by(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def bench(url: str, pid: int, pool: ProcessPoolExecutor) -> list[dict[str, object]]:
    control, loop = await connect(url, "control"), asyncio.get_running_loop()
    await control.declare(SUBJECT, "work", [READER])
    rows: list[dict[str, object]] = []

    async def at_once(*calls: tuple[Any, ...]) -> list[Any]:
        return await asyncio.gather(*(loop.run_in_executor(pool, in_process, *call) for call in calls))

    for size in TRIP_BYTES:
        times, _ = await at_once((time_trips, url, size), (send_trips, url, size))
        for what, part in (("in hand", 0), ("acknowledged", 1)):
            rows.append({"what": f"trip until {what}, ms", "bytes": size} | percentiles([each[part] for each in times]))
    for size in FLOW_BYTES:
        for clients in CLIENTS:
            share = NUM_RECORDS // clients
            senders = [(send_many, url, size, f"{size}/{clients}/{n}", share) for n in range(clients)]
            readers = [(read_many, url, share)] * clients
            again = [(send_many, url, size, f"{size}/{clients}/{n}/again", share) for n in range(clients)]
            for what, calls in (
                ("published", senders),
                ("pulled and acknowledged", readers),
                ("both at once", [*again, *readers]),
            ):
                computed = computed_by(pid)
                found = figures(await at_once(*calls), computed_by(pid) - computed)
                rows.append({"what": f"{what}, records/s", "bytes": size, "clients": clients} | found)
    await control.close()
    return rows


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats", run="bench")
        url = await server.start()
        try:
            with ProcessPoolExecutor(2 * max(CLIENTS), multiprocessing.get_context("spawn")) as pool:
                assert server.pid is not None
                rows = await bench(url, server.pid, pool)
        finally:
            await server.stop()
    print(f"load of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps(rows))


if __name__ == "__main__":
    asyncio.run(main())
