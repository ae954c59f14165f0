"""Runs with a full disk or memory end soon, with the cause last."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import fill
from runs import train
from started import OFF, Started


def test_a_disk_that_is_full_at_the_start(job_file: Path, small_disk: Path) -> None:
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job_file)]
    done = subprocess.run([*command, "--out", str(small_disk / "out")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{small_disk}/out: disk full: the run's servers need 8.4 MB, and ")
    assert "Traceback" not in done.stderr
    assert list(small_disk.iterdir()) == [], "nothing was begun"


def test_a_disk_that_fills_up_ends_the_run_with_its_cause_in_the_last_line(
    job_file: Path, disk: Path, starting: Callable[..., Started]
) -> None:
    run = starting("disk/out", "training.steps=3000", "observability.traces=false")
    run.until(" 1/3000 ")
    fill(disk)
    output = run.ends(1)
    assert "No space left on device" in output
    assert "started again" not in output
    assert "cannot be written down" in output.splitlines()[-1], "nor the manifest"
    assert "disk full" in output.splitlines()[-1] or "storage full" in output.splitlines()[-1]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="without unshare /dev/shm cannot be made small")
def test_shared_memory_that_is_too_small_for_the_weights(job_file: Path) -> None:
    """Shared memory has .3 MB, where containers default to 64 MB. The curve is the same."""
    whole = train(job_file, "one")
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job_file), "--set", OFF]
    script = 'mount -t tmpfs -o size=300k tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", *command, "--out", str(job_file.parent / "many")],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    [told] = [line for line in done.stderr.splitlines() if line.startswith("/dev/shm has")]
    assert told.endswith(f"they go through {job_file.parent}/many/processes")
    from runs import curve_of

    assert curve_of(job_file, "many") == whole
