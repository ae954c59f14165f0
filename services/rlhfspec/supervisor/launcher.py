"""Fork server that starts workers fast, by forking a process with all imports done.

The launcher reads a JSON line per process and writes its pid. A double fork makes the process a child of the
supervisor, a subreaper, so the launcher may restart. Forks copy no threads, so it has none but numpy's BLAS.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from rlhfspec.errors import ServerFailed
from rlhfspec.messages.loop import STAGES
from rlhfspec.messages.servers.guardian import kill
from rlhfspec.worker.process import STARTED, end_with_the_supervisor

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MOST_KILLS = 20  # of a launcher while it starts one process
_LAUNCH_SECONDS = 120.0  # the first one waits for all imports
_ROOM = "launcher".ljust(60, ".")  # a worker's name is written over it
STAGES_NEED = (
    "rlhfspec.training.data",
    "rlhfspec.engine.core",
    "rlhfspec.training.modeling.loading",
    "rlhfspec.training.modeling.critic",
    "rlhfspec.training.learning.learner",
    "rlhfspec.training.scoring.log_probs",
    "rlhfspec.training.scoring.values",
    "rlhfspec.training.scoring.rewards.sources",
    "rlhfspec.worker.worker",
    "rlhfspec.worker.health",
    "rlhfspec.training.weights.grpc",
    "rlhfspec.training.checkpoint",
    "rlhfspec.runs.folder.run_folder",
    *(f"rlhfspec.{stage.name}.service" for stage in STAGES),
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "transformers.modeling_layers",
)


# --- the supervisor's side ---------------------------------------------------------------------------------------


class Launched:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class Launcher:
    """Fork server for processes that share an environment."""

    def __init__(
        self, environment: Mapping[str, str], log: Path, lock: int | None = None, modules: Sequence[str] = STAGES_NEED
    ) -> None:
        self.environment = environment
        self._modules = modules
        self._log = log
        self._lock = lock
        self._one_at_a_time = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Launched:
        """Run `python -m ...` and append its output to `log`."""
        request = json.dumps({"name": name, "arguments": list(arguments), "log": str(log)})
        async with self._one_at_a_time:
            for _ in range(MOST_KILLS):
                try:
                    async with asyncio.timeout(_LAUNCH_SECONDS):
                        return Launched(await self._ask(request))
                except (ConnectionError, ValueError):
                    if await self.close() >= 0:  # it ended by itself and would again; kills are transient
                        break
                except TimeoutError:
                    await self.close()
                    break
                except asyncio.CancelledError:  # a late reply would be read as the next one's
                    self._kill()
                    raise
        raise ServerFailed("launcher", f"ended or hung while starting {name}: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"no output in {self._log}"

    async def _ask(self, request: str) -> int:
        await self._begin()
        assert self._process is not None
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(request.encode() + b"\n")
        await requests.drain()
        return int(await replies.readline())

    async def begin(self) -> bool:
        """Start the launcher early, because its imports take long; return False if it is running."""
        async with self._one_at_a_time:
            return await self._begin()

    async def _begin(self) -> bool:
        if self.pid is not None:
            return False
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**self.environment, STARTED: _ROOM}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __name__, str(os.getpid()), *self._modules, env=environment,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                pass_fds=() if self._lock is None else (self._lock,),
            )  # fmt: skip
        return True

    async def close(self) -> int:
        """Close the launcher and return its exit code; started processes continue."""
        self._kill()
        process, self._process = self._process, None
        return await process.wait() if process is not None else 0

    def _kill(self) -> None:
        if (pid := self.pid) is not None:
            kill([pid])


# --- the launcher's own side -------------------------------------------------------------------------------------


def main() -> None:
    supervisor, modules = int(sys.argv[1]), sys.argv[2:]
    end_with_the_supervisor()
    from rlhfspec.kernels.malloc import tune_malloc

    tune_malloc()
    replies = os.dup(1)
    os.dup2(2, 1)  # prints must not mix with replies
    for module in modules:
        import_module(module)
    gc.freeze()  # frozen objects stay shared with the forks
    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif os.fork():
            os._exit(0)
        else:
            _become(request, supervisor, replies)


def _become(request: dict[str, Any], supervisor: int, replies: int) -> NoReturn:
    os.setsid()
    while os.getppid() != supervisor:
        time.sleep(0.001)
    _rename(request["name"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((nothing, log, log)):
        os.dup2(handle, number)
    os.write(replies, f"{os.getpid()}\n".encode())
    for handle in (log, nothing, replies):
        os.close(handle)
    _, module, *rest = request["arguments"]
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()  # ends the interpreter as in any other process


def _rename(name: str) -> None:
    """Write the process name into the environment block, so that /proc shows it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(STARTED.encode())
    ctypes.memmove(place, name.encode().ljust(len(_ROOM), b"\0"), len(_ROOM))
    os.environ[STARTED] = name
    libc.prctl(PR_SET_NAME, name.encode())


if __name__ == "__main__":
    main()
