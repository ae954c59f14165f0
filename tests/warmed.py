"""Warm processes, forked from one that has imported torch and what runs and stages need.

`Popen(command)` is subprocess.Popen. If the command is this interpreter with -m or -c, the process comes from a nursery
(this file as a script) and looks like the command's: arguments and environment, also in /proc, working folder, handles
and parent. It has its own session, string hashes common to all, and an empty run picture (pictures.py; `DRAWS`).
A process with a variable of `READ_BY_IMPORTS` starts normally.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
ROOM = "WARMED_ROOM"  # for environments that are longer than the nursery's own
ROOM_BYTES, WORDS_BYTES, REQUEST_BYTES = 1 << 16, 1 << 14, 1 << 17
PATIENCE_SECONDS = 120.0  # the first one waits for all imports
DRAWS_AT_THE_END = "rlhfspec.runs.view.summary.overview"
DRAWS = "WARMED_DRAWS"  # a variable: what is started with it draws all the same
HIGH = 500  # no handle that a process is given has such a number
READ_BY_IMPORTS = (
    "PYTHON", "OMP_", "MKL_", "TORCH", "TRITON", "CUDA", "HF_", "TRANSFORMERS", "TOKENIZERS", "MPL", "GRPC", "LD_",
    "LANG", "LC_", "MALLOC",
)  # fmt: skip


class Nursery:
    """Nursery. `channel`: to its process. `imported`: its environment at import."""

    def __init__(self, channel: socket.socket, imported: Mapping[str, str], *, nests: bool) -> None:
        self._channel = channel
        self._imported = read_by_imports(imported)
        self._nests = nests  # what it starts may start others so
        self._one_at_a_time = threading.Lock()

    def takes(self, words: list[str], environment: Mapping[str, str]) -> bool:
        if words[0] != sys.executable or words[1:2] not in (["-m"], ["-c"]) or len(words) < 3:
            return False
        fits = len(_area(words)) < WORDS_BYTES and len(_area(_pairs(environment))) < ROOM_BYTES
        return fits and read_by_imports(environment) == self._imported

    def start(self, words: list[str], environment: Mapping[str, str], folder: str, handles: Mapping[int, int]) -> int:
        """Start a child of this process. `handles`: own handles by their number in the child."""
        told = {"words": words, "pairs": _pairs(environment), "folder": folder, "numbers": list(handles)}
        told |= {"parent": os.getpid(), "nests": self._nests}
        libc = ctypes.CDLL(None)
        before = ctypes.c_int()
        with self._one_at_a_time:
            libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [json.dumps(told).encode()], list(handles.values()))
                reply = self._channel.recv(100)
                assert reply, "the nursery died"
                return int(reply)
            except BaseException:  # a test's time limit, too: a late answer would be taken for the next one's
                self._channel.close()
                own_nursery.cache_clear()
                raise
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


class Popen(subprocess.Popen[Any]):
    nursery: Nursery | None = None  # None: this process's own is begun when it is needed first

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        (_, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest) = others
        words = [args] if isinstance(args, str | os.PathLike) else [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        usual = executable is None and preexec_fn is None and not shell and rest[1:4] == [None, None, None]
        nursery = self.nursery or own_nursery()
        if not usual or not nursery.takes(words, environment):
            return super()._execute_child(args, executable, preexec_fn, *others)  # type: ignore[misc]
        sys.audit("subprocess.Popen", words[0], words, cwd, env)
        given = {0: p2cread, 1: c2pwrite, 2: errwrite} | {number: number for number in pass_fds}
        handles = {number: number if handle == -1 else handle for number, handle in given.items()}
        self.pid = nursery.start(words, environment, os.fspath(cwd or os.getcwd()), handles)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def run(
    words: list[str], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run as subprocess.run does; the caller checks the exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output else {}
    with Popen(words, **pipes, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.returncode, output, errors)


@cache
def own_nursery() -> Nursery:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    ours.settimeout(PATIENCE_SECONDS)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with its:
        subprocess.Popen(
            [sys.executable, __file__, str(its.fileno()), "." * WORDS_BYTES],
            env=environment | {ROOM: "." * ROOM_BYTES}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()], start_new_session=True,
        ).returncode = 0  # fmt: skip  # nobody waits for it
    return Nursery(ours, environment, nests=True)


def _pairs(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _area(words: list[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    _ends_with_its_parent()
    from rlhfspec.kernels.malloc import tune_malloc

    tune_malloc()
    from rlhfspec.supervisor.launcher import STAGES_NEED

    for module in (*STAGES_NEED, "rlhfspec.supervisor.run", "rlhfspec.cli.local"):
        import_module(module)
    gc.freeze()
    serve(channel)


def leave_empty(_steps: object, path: Path, **_how: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _ends_with_its_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(channel: socket.socket) -> None:
    """Serve start requests. It returns in each started process when that has run."""
    while True:
        request, handles, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 64)
        if not request:
            os._exit(0)
        if (child := os.fork()) == 0:
            if os.fork():
                os._exit(0)  # an orphan is the nearest subreaper's child
            return _become(json.loads(request), handles, channel)
        os.waitpid(child, 0)
        for handle in handles:
            os.close(handle)


def _become(told: dict[str, Any], handles: list[int], channel: socket.socket) -> None:
    os.setsid()
    end = time.monotonic() + PATIENCE_SECONDS
    while os.getppid() != told["parent"]:
        time.sleep(0.0005)
        if time.monotonic() > end:
            os._exit(1)  # nobody waits for it any more
    environment = dict(pair.split("=", 1) for pair in told["pairs"])
    if told["nests"]:
        _have_a_nursery(environment, [*handles, channel.fileno()])
    channel = _out_of_the_way(channel)
    _take_handles(told["numbers"], handles)
    _write_over(told["words"], told["pairs"])
    if DRAWS not in environment:
        module, _, function = DRAWS_AT_THE_END.rpartition(".")
        setattr(sys.modules[module], function, leave_empty)
    os.environ._data.clear()  # type: ignore[attr-defined]
    os.environ._data.update({os.fsencode(name): os.fsencode(value) for name, value in environment.items()})  # type: ignore[attr-defined]
    os.chdir(told["folder"])
    channel.send(str(os.getpid()).encode())
    channel.close()
    _run(told["words"])


def _have_a_nursery(environment: Mapping[str, str], handles: list[int]) -> None:
    parent = os.getpid()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        _ends_with_its_parent()
        if os.getppid() != parent:
            os._exit(0)
        for handle in (*handles, ours.detach()):
            os.close(handle)
        serve(its)
    its.close()
    ours = _out_of_the_way(ours)
    ours.settimeout(PATIENCE_SECONDS)
    Popen.nursery = Nursery(ours, environment, nests=False)
    subprocess.Popen = Popen  # type: ignore[misc]


def _out_of_the_way(channel: socket.socket) -> socket.socket:
    """Move the channel off the handles that a process is given by number."""
    with channel:
        return socket.socket(fileno=fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))


def _take_handles(numbers: list[int], handles: list[int]) -> None:
    high = [fcntl.fcntl(handle, fcntl.F_DUPFD, HIGH) for handle in handles]
    for handle in handles:
        os.close(handle)
    for number, handle in zip(numbers, high, strict=True):
        os.dup2(handle, number)
        os.close(handle)


def _write_over(words: list[str], pairs: list[str]) -> None:
    """Overwrite arguments and environment where the system reads them, and the C library's environment."""
    with open("/proc/self/stat") as file:
        begin, end, environment, last = map(int, file.read().rpartition(")")[2].split()[45:49])
    libc = ctypes.CDLL(None)
    libc.clearenv()
    ctypes.memmove(begin, _area(words).ljust(end - begin, b"\0"), end - begin)
    ctypes.memmove(environment, _area(pairs).ljust(last - environment, b"\0"), last - environment)
    libc.putenv.argtypes = [ctypes.c_void_p]
    for pair in pairs:
        libc.putenv(environment)  # not copied: a launcher writes its name over one
        environment += len(os.fsencode(pair)) + 1


def _run(words: list[str]) -> None:
    how, what, *rest = words[1:]
    sys.orig_argv[:] = words
    sys.argv[:] = [what if how == "-m" else how, *rest]
    sys.path[0] = os.getcwd() if how == "-m" else ""
    if how == "-m":
        if not hasattr(sys.modules.get(what), "__path__"):
            sys.modules.pop(what, None)  # it was imported with others, and is run anew
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))
    sys.exit()


if __name__ == "__main__":
    main()
