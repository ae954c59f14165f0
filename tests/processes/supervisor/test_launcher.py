"""Launched processes are like others and outlive the launcher."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from faults.processes import environment_of

from rlhfspec.errors import ServerFailed
from rlhfspec.supervisor.launcher import PR_SET_CHILD_SUBREAPER, Launched, Launcher
from rlhfspec.worker.process import STARTED

PROGRAM = """
import json, os, sys, time
about = {
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "name": os.environ["RLHFSPEC_WORKER"],
    "arguments": sys.argv[1:], "module": __name__, "stdin": sys.stdin.read(),
    "handles": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}
print(json.dumps(about), flush=True)
code = sys.argv[1]
if code == "sleep":
    time.sleep(600)
if code == "raise":
    raise RuntimeError("no digits")
sys.exit(int(code) if code.isdigit() else code)
"""


class Started:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"RLHFSPEC_RUN": folder.name, "PYTHONPATH": path}
        self.launcher = Launcher(environment, folder / "logs" / "launcher.log", modules=("json",))
        self.processes: list[Launched] = []

    async def start(self, argument: str, name: str = "generator-0") -> Launched:
        self.processes.append(await self.launcher.start(name, ["-m", "program", argument, "a word"], self.log(name)))
        return self.processes[-1]

    def log(self, name: str = "generator-0") -> Path:
        return self.folder / f"{name}.jsonl"

    async def said(self, name: str = "generator-0") -> dict[str, object]:
        while not (self.log(name).exists() and self.log(name).read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        return dict(json.loads(self.log(name).read_text().splitlines()[-1]))


@asynccontextmanager
async def launching(folder: Path) -> AsyncIterator[Started]:
    started = Started(folder)
    try:
        yield started
    finally:
        for process in started.processes:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
        await started.launcher.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)  # orphans of other tests are not for us


async def test_a_started_process_has_its_own_session_arguments_and_log(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        started.log().write_text("an older line\n")
        first, other = await asyncio.gather(started.start("sleep"), started.start("sleep", "trainer-0"))
        about, of_other = await started.said(), await started.said("trainer-0")
        assert about["pid"] == about["session"] == first.pid
        assert of_other["pid"] == other.pid
        assert about["parent"] == os.getpid(), "the supervisor's child, not the launcher's"
        assert (about["name"], of_other["name"]) == ("generator-0", "trainer-0")
        assert (about["module"], about["arguments"], about["stdin"]) == ("__main__", ["sleep", "a word"], "")
        assert about["handles"] == [0, 1, 2], "the launcher's own are closed"
        assert started.log().read_text().startswith("an older line\n")
        for pid, name in ((first.pid, "generator-0"), (other.pid, "trainer-0")):
            seen = environment_of(pid)
            assert (seen[STARTED], seen["RLHFSPEC_RUN"]) == (name, tmp_path.name), "as others see it"
            assert Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"
        assert environment_of(started.launcher.pid)[STARTED] not in ("generator-0", "trainer-0")


@pytest.mark.parametrize(("argument", "code"), [("0", 0), ("78", 78), ("raise", 1), ("no digits", 1)])
async def test_the_exit_code_of_a_started_process_is_returned(tmp_path: Path, argument: str, code: int) -> None:
    async with launching(tmp_path) as started:
        assert await (await started.start(argument)).wait() == code
        assert ("no digits" in started.log().read_text()) == (code == 1)


async def test_the_signal_that_killed_a_started_process_is_returned(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        process = await started.start("sleep")
        assert process.returncode is None
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL


async def test_a_killed_launcher_is_replaced_and_its_processes_live_on(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        first = await started.start("sleep")
        dead = started.launcher.pid
        os.kill(dead, signal.SIGKILL)
        second = await started.start("sleep", "generator-1")
        assert started.launcher.pid not in (None, dead)
        for process, name in ((first, "generator-0"), (second, "generator-1")):
            assert process.returncode is None
            assert (await started.said(name))["pid"] == process.pid
            os.kill(process.pid, 0)


async def test_begin_restarts_a_dead_launcher(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        assert await started.launcher.begin()
        assert not await started.launcher.begin()
        os.kill(started.launcher.pid, signal.SIGKILL)
        while started.launcher.pid is not None:
            await asyncio.sleep(0.01)
        assert await started.launcher.begin()


async def test_a_start_succeeds_though_its_launchers_are_killed(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        starting = asyncio.create_task(started.start("sleep"))
        killed: set[int] = set()
        while len(killed) < 3:
            if (pid := started.launcher.pid) is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.001)
        assert (await starting).returncode is None


async def test_a_cancelled_start_is_not_confused_with_the_next_one(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        starting = asyncio.create_task(started.start("sleep", "generator-1"))
        while started.launcher.pid is None:
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        process = await started.start("sleep")
        assert (await started.said())["pid"] == process.pid


async def test_a_launcher_that_cannot_start_says_so(tmp_path: Path) -> None:
    async with launching(tmp_path) as started:
        launcher = Launcher(started.launcher.environment, tmp_path / "launcher.log", modules=("no_such_module",))
        with pytest.raises(
            ServerFailed, match=r"ended or hung while starting generator-0: ModuleNotFoundError: .*no_such_module"
        ):
            await launcher.start("generator-0", ["-m", "program", "0"], tmp_path / "log")


def test_workers_of_one_launcher_each_use_their_own_number_of_threads() -> None:
    """torch read OMP_NUM_THREADS when the launcher imported it."""
    script = """
import threading, torch

torch.get_num_threads()
from rlhfspec.worker.process import compute_with

compute_with(1)
seen = [torch.get_num_threads()]
later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
later.start()
later.join()
print(*seen)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == "1 1\n"
