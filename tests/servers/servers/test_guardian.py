"""A killed supervisor leaves no process, port or shared memory."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from faults.processes import is_alive, is_listening, of_run
from interpreters import child_of
from started import eventually

from rlhfspec.messages.servers import guardian
from rlhfspec.messages.servers.guardian import NUM_GUARDIANS, Guardians

# What a supervisor does, in small. Each child says by a line that it is there.
SUPERVISOR = """
import asyncio, json, os, subprocess, sys
from pathlib import Path
from rlhfspec.messages.servers.guardian import MARK, NUM_GUARDIANS, Guardians
from rlhfspec.messages.servers.nats import NatsServer
from rlhfspec.messages.servers.redis import RedisServer

uid, folder, shared = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
marked = {**os.environ, MARK: uid}
HANG = "import time; print(1, flush=True); time.sleep(120)"  # whatever goes wrong here, in the end they go
# Ranks below a worker: one as torchrun starts them, one without environment in a session of its own.
RANKS = f'''
import subprocess, sys
hang = [sys.executable, "-c", {HANG!r}]
quiet = {{"stdout": subprocess.DEVNULL}}  # what they say is not the first line here
ranks = [subprocess.Popen(hang, **quiet), subprocess.Popen(hang, **quiet, env={{}}, start_new_session=True)]
print(*[rank.pid for rank in ranks], flush=True)
ranks[0].wait()
'''
# Goes on starting others while it is being killed.
STORM = '''
import subprocess, sys, time
print(1, flush=True)
for _ in range(200):
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"])
    time.sleep(.02)
'''
# As a child between fork and exec: it does not show its mark until a while after the supervisor's death.
LATE = '''
import os, sys, time
print(1, flush=True)
while os.getppid() == int(sys.argv[1]):
    time.sleep(.01)
time.sleep(.3)
os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(120)"], {"RLHFSPEC_RUN": sys.argv[2]})
'''

def child(code, *arguments, env=marked):
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    return process, process.stdout.readline().split()

async def main():
    nats, redis = NatsServer(folder / "nats", run=uid), RedisServer(folder / "redis", run=uid)
    guardians = Guardians(uid, remove=[nats.folder, redis.folder, shared])
    guardians.start()
    shared.mkdir()
    (shared / "weights").write_bytes(b"0" * 4096)
    urls = [await nats.start(), await redis.start()]
    worker, ranks = child(RANKS)
    storm, _ = child(STORM)
    late, _ = child(LATE, str(os.getpid()), uid, env={})
    pids = [*guardians.pids, nats.pid, redis.pid, worker.pid, storm.pid, late.pid, *map(int, ranks)]
    print(json.dumps({"pids": pids, "urls": urls, "guardians": guardians.pids}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def supervisor(folder: Path, uid: str, shared: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    command = [sys.executable, "-c", SUPERVISOR, uid, str(folder), str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()
            guardian.end_run(uid, [shared])


@pytest.mark.parametrize("guardians_killed", range(NUM_GUARDIANS))
def test_nothing_remains_when_the_supervisor_is_killed(tmp_path: Path, guardians_killed: int) -> None:
    """All guardians but one are killed too."""
    uid = f"t{uuid4().hex[:8]}"
    shared = Path("/dev/shm") / f"rlhfspec-{uid}"
    with supervisor(tmp_path / "run", uid, shared) as (process, told):
        pids = {*map(int, told["pids"]), *of_run(uid)}
        assert all(map(is_alive, pids))
        began_at = {pid: start_of(pid) for pid in pids}  # another process may get the number of a dead one
        assert shared.exists()
        assert is_listening(told["urls"][0])
        for pid in told["guardians"][:guardians_killed]:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        began = time.monotonic()
        # The guardian is the last to go; it is marked too.
        eventually(lambda: not left(uid, began_at), lambda: f"what is left ends: {left(uid, began_at)}")
        print(f"nothing was left after {time.monotonic() - began:.1f} s")
        assert not shared.exists()
        assert not is_listening(told["urls"][0])
        assert [path.name for path in (tmp_path / "run").iterdir() if path.suffix != ".log"] == []


def test_servers_go_with_their_supervisor_also_when_no_guardian_is_left(tmp_path: Path) -> None:
    with supervisor(tmp_path / "run", f"t{uuid4().hex[:8]}", tmp_path / "shared") as (process, told):
        servers = [int(pid) for pid in told["pids"][NUM_GUARDIANS : NUM_GUARDIANS + 2]]
        assert all(map(is_alive, servers))
        for pid in told["guardians"]:
            os.kill(pid, signal.SIGKILL)
        process.kill()
        eventually(lambda: not any(map(is_alive, servers)), "NATS and Redis are gone")


def test_released_guardians_end_and_remove_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with child_of("r1") as other:
        watching = Guardians("r1", remove=[data])
        watching.start()
        assert len(watching.pids) == NUM_GUARDIANS
        watching.release()
        assert watching.pids == []
        assert other.poll() is None
        assert data.exists()
        watching.release()  # again: nothing happens


def test_releasing_dead_guardians_is_no_error() -> None:
    watching = Guardians("r1")
    watching.start()
    for pid in watching.pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not watching.pids, "their end is seen")
    watching.release()


def test_guardians_ignore_signals_to_the_supervisor_and_are_replaced() -> None:
    with child_of("r2") as other:
        watching = Guardians("r2")
        assert watching.start()
        first, second = watching.pids
        eventually(lambda: signals_ignored(first) >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}, "signals ignored")
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(first, each)
        assert not watching.start(), "all are there"
        os.kill(first, signal.SIGKILL)
        eventually(lambda: watching.pids == [second], "its end is seen")
        assert watching.start()
        assert len(watching.pids) == NUM_GUARDIANS
        assert second in watching.pids
        watching.release()
        assert other.poll() is None


def test_only_the_processes_of_this_run_are_ended(tmp_path: Path) -> None:
    link, target, file = tmp_path / "link", tmp_path / "target", tmp_path / "file"
    target.mkdir()
    link.symlink_to(target)
    file.write_text("")
    with child_of("r3") as ours, child_of("r33") as others:
        assert guardian.processes_of("r3") == {ours.pid}
        guardian.end_run("r3", [link, file, tmp_path / "missing"])
        assert ours.wait() == -signal.SIGKILL
        assert others.poll() is None
    assert [path.name for path in tmp_path.iterdir()] == ["target"], "a link is removed, not what it leads to"


@pytest.mark.parametrize(("whose", "is_left"), [("r1", False), ("r2", True), (None, False)])
def test_a_folder_that_another_run_made_is_left_alone(whose: str | None, is_left: bool, tmp_path: Path) -> None:
    """The supervisor was killed while starting this guardian, and the run was resumed at once."""
    place = tmp_path / "processes"
    place.mkdir()
    (place / "nats").write_text("data")
    if whose is not None:
        (place / guardian.UID).write_text(whose)
    guardian.end_run("r1", [place], quiet_seconds=0.0)
    assert place.exists() == is_left


def test_the_guardian_imports_only_the_standard_library() -> None:
    """The guardian imports only the standard library."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); import guardian; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(guardian.__file__).parent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "numpy", "pydantic", "rlhfspec"} & set(loaded)


def start_of(pid: int) -> str | None:
    with suppress(FileNotFoundError, ProcessLookupError):
        if is_alive(pid):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def left(uid: str, began_at: dict[int, str | None]) -> dict[int, str]:
    going = {pid for pid, began in began_at.items() if began is not None and start_of(pid) == began}
    commands = {}
    for pid in going.union(of_run(uid)):
        with suppress(OSError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-80:]
    return commands


def signals_ignored(pid: int) -> set[int]:
    [mask] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return {number for number in range(1, 65) if int(mask.split()[1], 16) >> (number - 1) & 1}
