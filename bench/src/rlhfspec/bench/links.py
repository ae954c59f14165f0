"""Seconds, and CPU of both ends, that a link takes per range of bytes, next to a plain copy and a plain socket.

    python -m rlhfspec.bench.links --kinds memory shm tcp --sizes 65536 4194304

The source process copies each range into the link's buffer, and the destination process copies it out. A range's time
lasts until the source knows that it was unpacked. CPU is of all threads of both processes. Kinds of links take turns;
figures are medians of all rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from rlhfspec.messages.servers.credentials.certificates import client_tls, create_credentials, server_tls
from rlhfspec.moves.migration.links.frames import read_into
from rlhfspec.moves.migration.links.opening import make_landing, open_sending

TLS = "tls"  # tcp with credentials
COPY, SOCKET = "copy", "socket"  # baselines: two copies in one thread; a bare TCP connection
_SECONDS = 30.0
_ROLE = "generator"
UInt8s = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    kind: str
    num_bytes: int
    seconds: float  # of a range, median
    cpu_seconds: float  # of a range, both ends, median
    rounds: int

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def cpu_seconds_per_mb(self) -> float:
        return self.cpu_seconds / (self.num_bytes / 1e6)


def measure(kinds: Sequence[str], sizes: Sequence[int], *, rounds: int, ranges: int = 10) -> list[LinkCost]:
    """Measure each kind at each size in bytes over `rounds` rounds of `ranges` ranges; the kinds take turns."""
    costs = []
    for num_bytes in sizes:
        with ExitStack() as opened:
            ends = {kind: opened.enter_context(_opened(kind, num_bytes)) for kind in kinds}
            seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
            cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
            for round_ in range(rounds + 1):
                for kind, end in ends.items():
                    elapsed, used = end(ranges)
                    if round_:  # the first round touches the pages
                        seconds[kind] += elapsed
                        cpu[kind].append(used / ranges)
        costs += [
            LinkCost(kind=kind, num_bytes=num_bytes, seconds=statistics.median(seconds[kind]),
                     cpu_seconds=statistics.median(cpu[kind]), rounds=rounds)
            for kind in kinds
        ]  # fmt: skip
    return costs


Round = Callable[[int], tuple[list[float], float]]  # ranges -> seconds of each, CPU of all


@contextmanager
def _opened(kind: str, num_bytes: int) -> Iterator[Round]:
    ours = np.full(num_bytes, 7, np.uint8)
    if kind in (COPY, "memory"):
        with _in_this_process(kind, ours) as one:
            yield lambda ranges: _timed(one, ranges, time.process_time)
        return
    context = multiprocessing.get_context("spawn")
    control, theirs = context.Pipe()
    with TemporaryDirectory() as folder:
        if kind == TLS:
            create_credentials(Path(folder), [_ROLE])
        process = context.Process(target=_destination, args=(kind, num_bytes, theirs, Path(folder)), daemon=True)
        process.start()
        theirs.close()
        try:
            with _sending(kind, ours, control, Path(folder)) as one:
                yield lambda ranges: _timed(one, ranges, lambda: time.process_time() + _asked(control, None))
        finally:
            control.close()
            process.join(_SECONDS)


def _timed(one: Callable[[str], None], ranges: int, cpu: Callable[[], float]) -> tuple[list[float], float]:
    before, seconds = cpu(), []
    for number in range(ranges):
        start = time.perf_counter()
        one(f"bench/{number}")
        seconds.append(time.perf_counter() - start)
    return seconds, cpu() - before


@contextmanager
def _in_this_process(kind: str, ours: UInt8s) -> Iterator[Callable[[str], None]]:
    theirs, between = np.zeros_like(ours), np.zeros_like(ours)
    if kind == COPY:

        def copied(_: str) -> None:
            between[:] = ours
            theirs[:] = between

        yield copied
        return
    landing = make_landing(kind)
    sending = open_sending(landing.offer)

    def sent(key: str) -> None:
        sending.room(len(ours))[:] = ours.data
        sending.send(key, len(ours))
        theirs[:] = np.frombuffer(landing.take(key, len(ours), timeout=_SECONDS), np.uint8)
        landing.done(key)

    yield sent
    sending.close()
    landing.close()


@contextmanager
def _sending(kind: str, ours: UInt8s, control: Connection, folder: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that sends the bytes `ours` under a key and waits for the destination's reply on `control`."""
    offer = control.recv()
    if kind == SOCKET:
        with socket.create_connection(("127.0.0.1", offer)) as connection:
            between = np.zeros_like(ours)

            def pushed(key: str) -> None:
                between[:] = ours
                control.send(key)
                connection.sendall(between.data)
                control.recv()

            yield pushed
        return
    sending = open_sending(offer, tls=client_tls(folder, _ROLE) if kind == TLS else None)

    def sent(key: str) -> None:
        sending.room(len(ours))[:] = ours.data
        sending.send(key, len(ours))
        control.send(key)
        control.recv()

    yield sent
    sending.close()


def _asked(control: Connection, question: None) -> float:
    control.send(question)
    return float(control.recv())


def _destination(kind: str, num_bytes: int, control: Connection, folder: Path) -> None:
    """Run the destination process: unpack the range of each received key; reply to None with the CPU seconds so far."""
    theirs = np.zeros(num_bytes, np.uint8)
    with ExitStack() as opened:
        listening = _listening(theirs, control) if kind == SOCKET else _landing(kind, theirs, control, folder)
        unpack = opened.enter_context(listening)
        while True:
            try:
                key = control.recv()
            except EOFError:
                return
            if key is None:
                control.send(time.process_time())
            else:
                unpack(key)
                control.send(True)


@contextmanager
def _landing(kind: str, theirs: UInt8s, control: Connection, folder: Path) -> Iterator[Callable[[str], None]]:
    landing = make_landing("tcp", tls=server_tls(folder, _ROLE)) if kind == TLS else make_landing(kind)
    control.send(landing.offer)

    def unpack(key: str) -> None:
        theirs[:] = np.frombuffer(landing.take(key, len(theirs), timeout=_SECONDS), np.uint8)
        landing.done(key)

    yield unpack
    landing.close()


@contextmanager
def _listening(theirs: UInt8s, control: Connection) -> Iterator[Callable[[str], None]]:
    between = np.zeros_like(theirs)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        control.send(listening.getsockname()[1])
        connection, _ = listening.accept()

    def unpack(_: str) -> None:
        read_into(connection, between.data, time.monotonic() + _SECONDS)
        theirs[:] = between

    with connection:
        yield unpack


def table(costs: Sequence[LinkCost]) -> str:
    lines = ["| link | bytes | ms a range | GB/s | CPU ms a MB |", "|---|---|---|---|---|"]
    for cost in costs:
        speed, cpu = cost.bytes_per_second / 1e9, cost.cpu_seconds_per_mb * 1e3
        lines.append(f"| {cost.kind} | {cost.num_bytes} | {cost.seconds * 1e3:.3f} | {speed:.2f} | {cpu:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(description="What a link costs, range by range, against a plain copy and a plain socket.")
    parser.add_argument("--kinds", nargs="+", default=[COPY, SOCKET, "memory", "shm", "tcp", TLS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1 << 16, 1 << 20, 4 << 20, 64 << 20])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs = measure(arguments.kinds, arguments.sizes, rounds=arguments.rounds)
    print(json.dumps([asdict(cost) for cost in costs]) if arguments.json else table(costs))


if __name__ == "__main__":
    main()
