"""Compare control requests of moves over frames, one persistent gRPC stream, and unary gRPC calls.

    python bench/move_control.py [--questions 2000] [--turns 9] [--bytes 3000] [--tls]

A client and a server process exchange the same bytes; ways take turns. CPU is that of both processes, latency the
client's. Printed are medians of the turns, and of each turn's CPU ratio to frames.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from rlhfspec.messages.servers.credentials.certificates import (
    channel_credentials,
    client_tls,
    create_credentials,
    server_credentials,
    server_tls,
)
from rlhfspec.moves.migration.base import Peer
from rlhfspec.moves.migration.control import StreamControl, StreamControlServer

SERVICE = "rlhfspec.bench.MoveControl"
NUMBER = 4  # bytes of a request's number, as replies may come in any order
ROLE = "generator"
WAYS = ("frames", "stream", "unary")
Ask = Callable[[bytes], Awaitable[bytes]]


class KeptStream:
    """Client of one bidirectional stream that stays open and carries many requests at once."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream(f"/{SERVICE}/Stream")()
        self._numbers = count(1)
        self._asked: dict[bytes, asyncio.Future[bytes]] = {}
        self._reading = asyncio.create_task(self._read())

    async def ask(self, question: bytes) -> bytes:
        number = next(self._numbers).to_bytes(NUMBER, "big")
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._call.write(number + question)
        return await future

    async def close(self) -> None:
        await self._call.done_writing()
        await self._reading

    async def _read(self) -> None:
        while (said := await self._call.read()) is not grpc.aio.EOF:
            self._asked.pop(said[:NUMBER]).set_result(said[NUMBER:])


async def answer_stream(context: Any) -> None:
    while (said := await context.read()) is not grpc.aio.EOF:
        await context.write(said[:NUMBER] + await answer(said[NUMBER:]))


async def answer(question: bytes) -> bytes:
    return question


async def answer_unary(question: bytes, _: Any) -> bytes:
    return await answer(question)


async def answer_stream_call(_: AsyncIterator[bytes], context: Any) -> None:
    await answer_stream(context)


async def serve(pipe: Connection, credentials: Path | None) -> None:
    frames = StreamControlServer(tls=server_tls(credentials, ROLE) if credentials else None)
    frames.serve(answer)
    server = grpc.aio.server()
    handlers = {
        "Stream": grpc.stream_stream_rpc_method_handler(answer_stream_call),
        "Unary": grpc.unary_unary_rpc_method_handler(answer_unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    if credentials:
        port = server.add_secure_port("127.0.0.1:0", server_credentials(credentials, ROLE))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send((frames.address, f"127.0.0.1:{port}"))
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def told() -> None:
        if pipe.recv() == "end":
            ended.set()
        else:
            pipe.send(time.process_time())

    loop.add_reader(pipe.fileno(), told)
    await ended.wait()
    await server.stop(None)
    frames.close()


def serving(pipe: Connection, credentials: Path | None) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(pipe, credentials))


def cpu_of(pipe: Connection) -> float:
    """Return the CPU seconds used so far by client and server together."""
    pipe.send("cpu")
    return float(pipe.recv()) + time.process_time()


async def turn(ask: Ask, question: bytes, num: int, pipe: Connection) -> dict[str, float]:
    cpu, latencies = cpu_of(pipe), []
    for _ in range(num):
        start = time.perf_counter()
        assert await ask(question) == question
        latencies.append(time.perf_counter() - start)
    return {"cpu_ms": (cpu_of(pipe) - cpu) / num * 1e3, "latency_ms": statistics.median(latencies) * 1e3}


async def measure(args: argparse.Namespace, pipe: Connection, credentials: Path | None) -> dict[str, Any]:
    frames_address, grpc_address = pipe.recv()
    frames = StreamControl(client_tls(credentials, ROLE) if credentials else None)
    peer = Peer(name="generator-1", address=frames_address, incarnation="")
    channel = (
        grpc.aio.secure_channel(grpc_address, channel_credentials(credentials, ROLE))
        if credentials
        else grpc.aio.insecure_channel(grpc_address)
    )
    stream, unary = KeptStream(channel), channel.unary_unary(f"/{SERVICE}/Unary")
    asks: dict[str, Ask] = {"frames": lambda said: frames.ask(peer, said), "stream": stream.ask, "unary": unary}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    question = bytes(args.bytes)
    for number in range(args.turns + 1):
        for way in WAYS if number % 2 else reversed(WAYS):
            one = await turn(asks[way], question, args.questions, pipe)
            if number:  # the first warms up
                found[way].append(one)
    await stream.close()
    await channel.close()
    frames.close()
    pipe.send("end")
    return {way: summary(turns, found["frames"]) for way, turns in found.items()}


def summary(turns: list[dict[str, float]], of_frames: list[dict[str, float]]) -> dict[str, float]:
    medians = {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}
    ratios = [turn["cpu_ms"] / frames["cpu_ms"] for turn, frames in zip(turns, of_frames, strict=True)]
    return medians | {"cpu_ratio": round(statistics.median(ratios), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--bytes", type=int, default=3000)
    parser.add_argument("--tls", action="store_true")
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        credentials = Path(folder) if args.tls else None
        if credentials:
            create_credentials(credentials, [ROLE])
        process = multiprocessing.get_context("spawn").Process(target=serving, args=(theirs, credentials))
        process.start()
        result = asyncio.run(measure(args, ours, credentials))
        process.join()
    print(json.dumps({"questions": args.questions, "turns": args.turns, "bytes": args.bytes, "tls": args.tls} | result))


if __name__ == "__main__":
    main()
