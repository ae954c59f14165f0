"""A run launched by torchrun: rank 0 runs the stages, all ranks share the training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from runs import curve_of, train

LOSSES = ("policy_loss", "kl", "grad_norm", "entropy")


def run_in_a_group(command: list[str]) -> tuple[int, str]:
    """Whatever happens, torchrun's ranks end with it."""
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
        return process.returncode, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_two_ranks_learn_what_one_learns(job_file: Path) -> None:
    alone = train(job_file, "alone", "training.steps=2", "training.optimizer.learningRate=1e-4")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "rlhfspec.cli.start", "run", str(job_file), "--out", str(job_file.parent / "ranks")]
    for override in ("training.steps=2", "training.optimizer.learningRate=1e-4", "generation.speculation.mode=off"):
        command += ["--set", override]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 2/2") == 1, "the other rank is silent"
    for one, both in zip(alone, curve_of(job_file, "ranks"), strict=True):
        assert one["reward"] == both["reward"]
        for name in LOSSES:
            assert one[name] == pytest.approx(both[name], abs=1e-6, rel=1e-4), name
