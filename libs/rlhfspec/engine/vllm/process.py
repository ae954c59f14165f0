"""Child process of vLLM, called with deadlines and killed with all its descendants."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhfspec.engine.vllm import LENGTHS
from rlhfspec.errors import InvalidRequest, RLHFSpecError
from rlhfspec.messages.servers.attached import attached

log = logging.getLogger("rlhfspec.vllm")
START_SECONDS = 600.0
_SERVE = Path(__file__).parent / "inside" / "serve.py"
_END_SECONDS = 2.0
_OWN = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the child itself, which sleeps while idle
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_BY_DEFAULT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several generators may share a machine's cores
    "VLLM_CPU_KVCACHE_SPACE": "1",  # the number of blocks sets the real size
}


class VllmEnded(RLHFSpecError):
    """Raised when the child died or was killed; the message holds its last output."""


class VllmProcess:
    """Child process that runs vLLM and ends with its parent. `orders`: commands sent at each start. Not thread-safe."""

    def __init__(self, python: Path, orders: dict[str, dict[str, Any]], environment: dict[str, str]) -> None:
        self._python = python.absolute()  # the child starts in /, where its ranks find no foreign modules
        self._orders = orders
        self._environment = environment
        self._last_words: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> dict[str, Any]:
        """Start the child, send it the constructor's `orders`, and return all replies as one mapping."""
        self.close()
        self._last_words.clear()
        started = threading.Event()
        threading.Thread(target=self._keep, args=(started,), name="vllm", daemon=True).start()
        started.wait()
        if self._process is None:
            raise VllmEnded(f"{self._python} cannot be started: {' '.join(self._last_words)}")
        self._closing = weakref.finalize(self, _end, self._process)
        answers: dict[str, Any] = {}
        for name, arguments in self._orders.items():
            answers |= self.ask(name, arguments, seconds=START_SECONDS)
        return answers

    def ask(self, name: str, arguments: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Send a command and return its reply. Raise VllmEnded, killing the child, if none comes in time."""
        process = self._process
        if process is None or process.stdin is None:
            raise VllmEnded("the process is not running")
        end = time.monotonic() + seconds
        try:
            process.stdin.write(json.dumps({name: arguments}).encode() + b"\n")
            process.stdin.flush()
            num_words, num_bytes = LENGTHS.unpack(_read(process, LENGTHS.size, end))
            answer: dict[str, Any] = json.loads(_read(process, num_words, end))
            answer["arrays"] = _read(process, num_bytes, end)
        except TimeoutError:
            self.close()
            raise VllmEnded(f"no answer to {name} within {seconds:g} s") from None
        except (BrokenPipeError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self._listening.join(_END_SECONDS)
            answer = {"failed": self._how_it_ended(process)}
        if not {"failed", "refused"} & set(answer):
            return answer
        self.close()
        if "refused" in answer:
            raise InvalidRequest(f"spec.{answer['field']}", None, answer["refused"])
        raise VllmEnded(answer["failed"])

    def _how_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        code = process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        return f"{how}: {self._last_words[-1]}" if self._last_words and code != -signal.SIGKILL else how

    def close(self) -> None:
        if self._process is not None:
            self._closing()
            self._process = None

    def _keep(self, started: threading.Event) -> None:
        try:
            process = self._started()
        except OSError as error:
            self._last_words.append(str(error.strerror))
            started.set()
            return
        self._process, self._listening = process, threading.Thread(target=self._listen, args=(process,), daemon=True)
        self._listening.start()
        started.set()
        process.wait()  # the system kills the child when the thread that started it ends

    def _started(self) -> subprocess.Popen[bytes]:
        own = _OWN | {"RLHFSPEC_VLLM_CODE": _code()} | self._environment
        return subprocess.Popen(
            attached([str(self._python), str(_SERVE)]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**_BY_DEFAULT, **_without_ours(os.environ), **own}, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if said := line.decode(errors="replace").rstrip():
                    self._last_words.append(said.strip()[:300])
                    log.info("%s", said)


def _without_ours(environment: Any) -> dict[str, str]:
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONWARNINGS"}
    return {name: value for name, value in environment.items() if name not in ours}


def _code() -> str:
    kernels = find_spec("rlhfspec.kernels")
    assert kernels is not None
    assert kernels.origin is not None
    folders = (Path(__file__).parents[2], Path(kernels.origin).parents[1])
    return os.pathsep.join(dict.fromkeys(map(str, folders)))


def _read(process: subprocess.Popen[bytes], num: int, end: float) -> bytes:
    assert process.stdout is not None
    descriptor, parts = process.stdout.fileno(), list[bytes]()
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while num:
        if not waiting.poll(max(end - time.monotonic(), 0.0) * 1e3):
            raise TimeoutError
        parts.append(os.read(descriptor, num))
        if not parts[-1]:
            raise EOFError
        num -= len(parts[-1])
    return b"".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    process.stdout.close()
