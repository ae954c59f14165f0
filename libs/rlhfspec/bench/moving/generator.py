"""A generator of the benchmarks of moves: a process of one thread on one core, told what to do by lines of JSON.

    {"load": {...}}    -> {"loaded": {...}}                      an engine, its first steps done
    {"stage": {...}}   -> {"ready": {}}                          the requests that may come
    {"go": {"ids"}}    -> {"finished": {"ids", "at"}}, ...       some of them, as they end
    {"end": {}}        -> {"ended": {...}}                       what came, and every step of the stage

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.base import EngineStep

_IDLE_SECONDS = 0.002


class Generator:
    """Holds the engine; `answers`: where lines go. A test hands in its own `engine_factory`."""

    def __init__(self, answers: IO[str], engine_factory: Any = Engine.from_pretrained) -> None:
        self._answers = answers
        self._engine_factory = engine_factory
        self._engine: Any = None
        self._requests: dict[str, Request] = {}
        self._completions: list[Completion] = []
        self._steps: list[tuple[float, int, int, int, float]] = []
        self._handlers: dict[str, Callable[..., None]] = {
            "load": self._load,
            "stage": self._stage,
            "go": self._go,
            "end": self._end,
        }

    def serve(self, requests: IO[str]) -> None:
        """Until `requests` end. The engine steps whenever it has work; what came is done between two steps."""
        coming: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(requests, coming), name="requests", daemon=True).start()
        while True:
            busy = self._engine is not None and self._engine.has_work
            while not busy or not coming.empty():
                if not (line := coming.get()):
                    return
                [(name, arguments)] = json.loads(line).items()
                self._handlers[name](**arguments)
                busy = self._engine is not None and self._engine.has_work
            self._step()

    def _tell(self, name: str, **what: Any) -> None:
        print(json.dumps({name: what}), file=self._answers, flush=True)

    def _load(self, *, target: str, draft: str, **options: Any) -> None:
        self._engine = self._engine_factory(target, drafter=draft, **options)
        self._tell("loaded", arithmetic=self._engine.state.target.runner.config.arithmetic)

    def _stage(self, *, name: str, speculation: str, sequences: list[dict[str, Any]]) -> None:
        """Each stage has groups of its own: what an earlier one generated must not help its drafts."""
        self._engine.set_speculation(speculation)
        made = [request_of(name, **sequence) for sequence in sequences]
        self._requests = {request.id: request for request in made}
        self._completions, self._steps = [], []
        self._tell("ready")

    def _go(self, *, ids: list[str]) -> None:
        for name in ids:
            self._engine.submit(self._requests[name])

    def _step(self) -> None:
        report: EngineStep = self._engine.step()
        now = time.monotonic()
        self._steps.append((now, report.num_decoding, report.num_prefill_tokens, report.num_committed, report.seconds))
        if report.finished:
            self._completions += report.finished
            self._tell("finished", ids=[done.id for done in report.finished], at=now)

    def _end(self) -> None:
        self._engine.check_integrity()
        self._tell("ended", digests={done.id: digest_of(done) for done in self._completions}, steps=self._steps,
                   cpu_seconds=time.process_time())  # fmt: skip


def request_of(stage: str, *, id: str, prompt: list[int], max_tokens: int, seed: int, group: int) -> Request:
    return Request(
        id=id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        seed=seed,
        group=f"{stage}/{group}",
    )


def digest_of(done: Completion) -> str:
    """Changes with any token or with any bit of a log-prob."""
    content = repr((done.token_ids, done.log_probs, done.finish_reason))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _read(requests: IO[str], coming: queue.SimpleQueue[str]) -> None:
    for line in requests:
        coming.put(line)
    coming.put("")


def main() -> None:
    """`python -m rlhfspec.bench.moving.generator CORE`; what libraries print goes to standard error."""
    os.sched_setaffinity(0, {int(sys.argv[1])})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Generator(answers).serve(sys.stdin)


if __name__ == "__main__":
    main()
