"""Benchmark worker that serves rlhfspec's engine over HTTP, with rollouts beside the chats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

from rlhfspec.bench.generating.ours import digest
from rlhfspec.bench.rivals.serve import serve
from rlhfspec.bench.serving.client import TOKEN
from rlhfspec.bench.serving.load import WARM_TOKENS, PlannedRollout, ServingLoop, rollouts
from rlhfspec.common.web import listen, serving
from rlhfspec.door.calls import MOST_CONVERSATIONS, EngineThread
from rlhfspec.door.server import PolicyDoor
from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.base import EngineStep
from rlhfspec.errors import RLHFSpecError


class SharedEngine:
    """Engine that runs rollouts beside the calls of clients. When a rollout ends, the next one begins."""

    def __init__(
        self, engine: Any, planned: Iterator[PlannedRollout], count: int, *, name: str, equal: bool
    ) -> None:  # fmt: skip
        self._engine = engine
        self._planned = enumerate(planned)
        self._name = name
        self._equal = equal
        self._open: set[str] = set()
        self.digests: dict[str, str] = {}  # of finished rollouts
        self.num_tokens = 0  # of rollouts and chats
        self.step_seconds: list[float] = []
        for _ in range(count):
            self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request, response: tuple[int, ...] = ()) -> None:
        """Submit a chat, in a group of its own: the same chat of another mode must not help to draft it."""
        priority = 0 if self._equal else request.priority
        self._engine.submit(replace(request, group=request.id, priority=priority), response)

    def step(self) -> EngineStep:
        report: EngineStep = self._engine.step()
        self.num_tokens += report.num_committed
        self.step_seconds.append(report.seconds)
        for done in report.finished:
            if done.id in self._open:
                if done.finish_reason == "error":
                    raise RLHFSpecError(done.error)
                self._open.remove(done.id)
                self.digests[done.id.removeprefix(self._name)] = digest([done])
                self._begin()
        return report

    def leave(self) -> None:
        """Drop all rollouts and kept KV."""
        for name in self._open:
            self._engine.cancel(name)
        self._engine.forget_kept()

    def _begin(self) -> None:
        index, rollout = next(self._planned)
        request = Request(
            id=f"{self._name}/{index}", prompt_token_ids=rollout.prompt, seed=rollout.seed,
            params=SamplingParams(max_tokens=rollout.num_tokens, ignore_eos=True),
            group=f"{self._name}/{rollout.group}",
        )  # fmt: skip
        self._engine.submit(request)
        self._open.add(request.id)


class ServingWorker:
    """Worker that keeps its engine, and serves it anew between each `begin` and `end`."""

    def __init__(self) -> None:
        self._loop = ServingLoop()
        self._num_turns = 0

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._engine = engine = Engine.from_pretrained(arguments["model"], **arguments["engine"])
        self._tokenizer = cast("Any", engine.state.tokenizer)
        self._tokenizer.chat_template = arguments["template"]
        return {"loaded": {"arithmetic": engine.state.target.runner.config.arithmetic}}

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._num_turns += 1
        count, planned = arguments["count"], rollouts(**arguments["rollouts"])
        shared: Any = SharedEngine(
            self._engine, planned, count, name=f"turn-{self._num_turns}", equal=arguments["equal"]
        )
        self._shared, self._thread = shared, EngineThread(shared, most_kept=MOST_CONVERSATIONS)
        while shared.num_tokens < WARM_TOKENS * count:
            if self._thread.calls.ended is not None:
                raise self._thread.calls.ended
            time.sleep(0.05)
        port = self._loop.start(self._open()).result()
        self._began = time.perf_counter(), shared.num_tokens, len(shared.step_seconds)
        return {"url": f"http://127.0.0.1:{port}", "body": {}}

    def end(self, arguments: dict[str, Any]) -> dict[str, Any]:
        began, num_tokens, num_steps = self._began
        ended = {"seconds": time.perf_counter() - began, "num_tokens": self._shared.num_tokens - num_tokens}
        self._loop.start(self._stack.aclose()).result()
        self._thread.close()
        self._thread.calls.leave()
        self._shared.leave()
        steps = self._shared.step_seconds[num_steps:]
        return ended | {"step_seconds": statistics.median(steps or [0.0]), "digests": self._shared.digests}

    async def _open(self) -> int:
        door = PolicyDoor(self._thread.calls, self._tokenizer, name="bench", token=TOKEN)
        self._stack = AsyncExitStack()
        return await self._stack.enter_async_context(serving(door.app(), listen("127.0.0.1", 0)))


if __name__ == "__main__":
    worker = ServingWorker()
    serve({"load": worker.load, "begin": worker.begin, "end": worker.end})
