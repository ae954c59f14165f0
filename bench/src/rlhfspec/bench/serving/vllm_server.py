"""Benchmark worker for vLLM's own OpenAI server, with rollouts as requests of lower priority that are kept open.

python -m rlhfspec.bench.serving.vllm_server PYTHON_WITH_VLLM
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from urllib.request import urlopen

import aiohttp

from rlhfspec.bench.rivals.serve import serve
from rlhfspec.bench.serving.load import WARM_TOKENS, PlannedRollout, ServingLoop, rollouts
from rlhfspec.bench.worker import RIVALS, WorkerFailed
from rlhfspec.common.web import listen
from rlhfspec.door.server import MODEL_NAME

_PATIENCE_SECONDS = 600.0
_STEP_SECONDS = 1.0  # of the server at most
_TOKENS = "vllm:generation_tokens_total"
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class VllmServer:
    """Worker that keeps the server, and the requests of rollouts between each `begin` and `end`."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._loop = ServingLoop()
        self._background: Future[None] | None = None
        self._num_turns = 0

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        engine = arguments["engine"]
        command = [
            self._python, str(RIVALS / "vllm_server.py"), "--model", arguments["model"], "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", MODEL_NAME, "--chat-template", arguments["template"],
            "--dtype", engine["dtype"], "--max-model-len", str(engine["max_context"]),
            "--max-num-seqs", str(engine["max_sequences"]), "--scheduling-policy", "priority", "--enforce-eager",
            "--generation-config", "vllm", "--seed", "0", "--disable-uvicorn-access-log",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, env=os.environ | _ENVIRONMENT, stdin=subprocess.PIPE, process_group=0)
        self._wait_until(bool)
        return {"loaded": {}}

    def begin(self, arguments: dict[str, Any]) -> dict[str, Any]:
        self._num_turns += 1
        # No turn finds the prompts of an earlier one. On CPUs a seed ends vLLM when a prompt runs in two chunks.
        body = {"cache_salt": f"turn-{self._num_turns}", "seed": None}
        if count := arguments["count"]:
            settled = self._num_tokens() + WARM_TOKENS * count
            self._background = self._loop.start(self._keep_open(rollouts(**arguments["rollouts"]), count, body))
            self._wait_until(lambda found: found.get(_TOKENS, 0.0) >= settled)
        self._began = time.perf_counter(), self._num_tokens()
        return {"url": self._url, "body": body | {"return_token_ids": True}}

    def end(self, arguments: dict[str, Any]) -> dict[str, Any]:
        began, num_tokens = self._began
        ended = {"seconds": time.perf_counter() - began, "num_tokens": self._num_tokens() - num_tokens}
        if self._background is not None:
            if self._background.done():
                self._background.result()
            self._background.cancel()
            self._background = None
        num_tokens = -1
        while num_tokens != (num_tokens := self._num_tokens()):  # until the last step has ended
            time.sleep(_STEP_SECONDS)
        return ended

    async def _keep_open(self, planned: Iterator[PlannedRollout], count: int, body: dict[str, Any]) -> None:
        timeout, connector = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as session:

            async def ask_again() -> None:
                for rollout in planned:
                    asked = {
                        "model": MODEL_NAME, "prompt": rollout.prompt, "max_tokens": rollout.num_tokens,
                        "temperature": 1.0, "ignore_eos": True, "priority": 1, **body,
                    }  # fmt: skip
                    async with session.post("/v1/completions", json=asked) as response:
                        response.raise_for_status()
                        await response.read()

            await asyncio.gather(*(ask_again() for _ in range(count)))

    def _num_tokens(self) -> float:
        return self._wait_until(lambda found: _TOKENS in found)[_TOKENS]

    def _metrics(self) -> dict[str, float]:
        """Return the server's numbers by name; none where it takes no connection."""
        try:
            with urlopen(f"{self._url}/metrics", timeout=_PATIENCE_SECONDS) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        found = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
        return {name.partition("{")[0]: float(value) for name, value in found}

    def _wait_until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not holds(found := self._metrics()):
            if self._background is not None and self._background.done():
                self._background.result()
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise WorkerFailed(f"vLLM's server ended or takes more than {_PATIENCE_SECONDS:.0f} s")
            time.sleep(0.2)
        return found


if __name__ == "__main__":
    worker = VllmServer(sys.argv[1])
    serve({"load": worker.load, "begin": worker.begin, "end": worker.end})
