"""Takes a cluster down when whoever started it is gone, by whatever way it went.

It is started beside every cluster with a pipe that only the starter writes to: its end, closed by `stop()` or by the
starter's death, is the signal. So a test that crashes leaves as little behind as one that passes.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from cluster.instance import Instance
from cluster.processes import kill_recorded

CGROUPS = Path("/sys/fs/cgroup")


class Guardian:
    def __init__(self, instance: Instance, lock: IO[bytes]) -> None:
        """The lock goes with it: the instance is free only once everything of it is gone."""
        self._instance, self._lock = instance, lock
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cluster.guardian import main; main()", str(instance.number)],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )

    def finish(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout=60)
        self._lock.close()
        if code:
            raise RuntimeError(f"cleaning up after cluster {self._instance.number} failed; see above")


def clean(instance: Instance) -> None:
    """Ends and removes everything of an instance; does nothing where nothing is."""
    if instance.folder.exists():
        kill_recorded(instance.folder)
    for namespace in Path("/run/netns").glob(f"{instance.bridge}n*"):
        subprocess.run(["ip", "netns", "delete", namespace.name], check=True)
    for link in [path.name for path in Path("/sys/class/net").glob(f"{instance.bridge}*")]:
        # a cable goes with the namespace of its other end, a little later than the command returns
        subprocess.run(["ip", "link", "delete", link], check=False, stderr=subprocess.DEVNULL)
    _remove_cgroups(instance)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if (place := line.split()[1]).startswith(f"{instance.folder}/"):
            subprocess.run(["umount", "--lazy", place], check=True)
    if instance.folder.exists():
        shutil.rmtree(instance.folder)


def _remove_cgroups(instance: Instance) -> None:
    """Processes in them were killed a moment ago: a group can be removed once the last of them is gone."""
    tops = [*CGROUPS.glob(f"{instance.bridge}-node*"), *CGROUPS.glob(f"*/{instance.bridge}-node*")]
    for top in tops:
        groups = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for group in [*groups, top]:
            _remove_group(group)


def _remove_group(group: Path, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clean(Instance(int(sys.argv[1])))
