"""Client of two generator processes, each with one engine thread and a core of its own."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from rlhfspec.bench.worker import Worker, WorkerFailed
from rlhfspec.errors import InvalidRequest

NUM_GENERATORS = 2
_PATIENCE_SECONDS = 600.0
Command = Callable[[int, int], list[str]]


def generator_command(number: int, core: int) -> list[str]:
    return [sys.executable, "-m", "rlhfspec.bench.moving", str(number), str(core)]


def two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < NUM_GENERATORS:
        raise InvalidRequest("cores", len(cores), "two generators need a core each")
    return cores[0], cores[1]


class Pair:
    """Connection to both generators, which also send messages unprompted."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._heard: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._listeners = [
            threading.Thread(target=self._listen, args=(number, worker), name=f"generator-{number}", daemon=True)
            for number, worker in enumerate(workers)
        ]
        for listener in self._listeners:
            listener.start()

    @classmethod
    def start(cls, command: Command = generator_command) -> Pair:
        """Start both generators; `command` maps a number and a core to a command line."""
        cores = enumerate(two_cores())
        return cls([Worker.start(command(number, core), num_threads=1) for number, core in cores])

    def load(self, **settings: Any) -> dict[str, Any]:
        """Load both engines and connect them; return the first generator's reply to the load request."""
        loaded = self.ask_all("load", "loaded", **settings)
        self.ask_all("meet", "met", peers=[one["peer"] for one in loaded])
        return loaded[0]

    def tell(self, number: int, request: str, **arguments: Any) -> None:
        self._workers[number].send(request, **arguments)

    def tell_all(self, request: str, **arguments: Any) -> None:
        for number in range(NUM_GENERATORS):
            self.tell(number, request, **arguments)

    def hear(self, timeout_seconds: float = _PATIENCE_SECONDS) -> tuple[int, str, dict[str, Any]]:
        """Return the sending generator, name and content of the next message, or raise WorkerFailed."""
        try:
            number, message = self._heard.get(timeout=timeout_seconds)
        except queue.Empty:
            raise WorkerFailed(f"no generator said anything for {timeout_seconds:g} s") from None
        [(name, rest)] = message.items()
        if name == "died":
            raise WorkerFailed(f"generator {number}: {rest}")
        return number, name, rest

    def hear_all(self, wanted: str) -> list[dict[str, Any]]:
        """Return each generator's next message named `wanted`, dropping other messages."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < NUM_GENERATORS:
            number, name, rest = self.hear()
            if name == wanted:
                answers[number] = rest
        return [answers[number] for number in range(NUM_GENERATORS)]

    def ask(self, number: int, request: str, answer: str, **arguments: Any) -> dict[str, Any]:
        """Send a generator a request and return its reply named `answer`, dropping other messages."""
        self.tell(number, request, **arguments)
        while True:
            speaker, name, rest = self.hear()
            if (speaker, name) == (number, answer):
                return rest

    def ask_all(self, request: str, answer: str, **arguments: Any) -> list[dict[str, Any]]:
        self.tell_all(request, **arguments)
        return self.hear_all(answer)

    def close(self) -> None:
        for worker in self._workers:
            worker.close_input()
        for listener in self._listeners:
            listener.join()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, number: int, worker: Worker) -> None:
        while True:
            try:
                message = worker.receive()
            except WorkerFailed as failure:
                self._heard.put((number, {"died": str(failure)}))
                return
            self._heard.put((number, message))


def sequences_of(
    ids: Iterable[str], prompts: Iterable[tuple[int, ...]], lengths: Iterable[int], seeds: Iterable[int],
    groups: Iterable[int], *, max_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return sequences in the generators' format. Engines get `max_tokens`; only generators use `lengths`, to cut."""
    columns = zip(ids, prompts, lengths, seeds, groups, strict=True)
    return [
        {"id": name, "prompt": list(prompt), "length": length, "max_tokens": max_tokens, "seed": seed, "group": group}
        for name, prompt, length, seed, group in columns
    ]
