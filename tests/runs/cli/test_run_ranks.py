"""A run by torchrun: rank 0 runs the stages, all ranks train."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from runs import curve_of, invoke, train
from started import Started, hold_rewards

from rlhfspec.common.ranks import SECRET

LOSSES = ("policy_loss", "kl", "grad_norm", "entropy")


def in_a_group(command: list[str], environment: Mapping[str, str] = {}, folder: Path | None = None) -> tuple[int, str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=150)
        return process.returncode, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def assert_learned_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours["reward"] == theirs["reward"]
        for name in LOSSES:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6, rel=1e-4), name


def test_two_ranks_learn_what_one_learns(job_file: Path) -> None:
    alone = train(job_file, "alone", "training.steps=2", "training.optimizer.learningRate=1e-4")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "rlhfspec.cli.start", "run", str(job_file), "--out", str(job_file.parent / "ranks")]
    for override in ("training.steps=2", "training.optimizer.learningRate=1e-4", "generation.speculation.mode=off"):
        command += ["--set", override]
    environment = os.environ | {"OMP_NUM_THREADS": "1", SECRET: "of this run"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 2/2") == 1, "the other rank is silent"
    assert_learned_alike(alone, curve_of(job_file, "ranks"))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "abc"}, "RANK: the environment variable must be a whole number (got 'abc')"),
        ({"RANK": "1"}, "RANK: the environment variable must be below WORLD_SIZE (1)"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: the environment variable must be below WORLD_SIZE (2)"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: the environment variable must be a whole number (got 'two')"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR: must be set together with WORLD_SIZE (2), as torchrun does"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RLHFSPEC_RANKS_SECRET: must be set together with WORLD_SIZE (2): random text that only this run's ranks",
        ),
    ],
)
def test_impossible_rank_variables_are_refused_in_one_line(
    job_file: Path, environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = invoke(job_file, "out", code=2)
    assert said in result.output
    assert len(result.output.splitlines()) == 1
    assert not (job_file.parent / "out").exists()


def test_an_empty_rank_variable_is_ignored(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    assert invoke(job_file, "out", "training.steps=1").exit_code == 0


def test_processes_start_their_own_ranks(job_file: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", SECRET: "of this"}
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", "--processes", str(job_file)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=job_file.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--processes: starts the trainer's ranks itself" in done.stderr


def test_a_rank_without_a_leader_names_the_address_it_waited_for(job_file: Path) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", SECRET: "of this"}
    command = [sys.executable, "-m", "rlhfspec.cli.start", "run", str(job_file), "--out", "out"]
    command += ["--set", "roles.trainer.deadlineSeconds=1"]
    code, output = in_a_group(command, environment, job_file.parent)
    assert code == 1
    assert "trainer 1: waited for rank 0 at 127.0.0.1:1 for 1 s" in output.splitlines()[-1]
    assert "Traceback" not in output


LEARNING = ("training.steps=6", "training.optimizer.learningRate=1e-4", "checkpoint.everySteps=1")
NODES = ("roles.trainer.nodes=2", "roles.trainer.ranksPerNode=2")


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
@pytest.mark.parametrize("rank", [0, 3])
def test_two_nodes_of_two_ranks_one_killed_learn(job_file: Path, starting: Callable[..., Started], rank: int) -> None:
    hold = hold_rewards(job_file, "1 nodes")
    alone = train(job_file, "alone", *LEARNING)
    run = starting("nodes", *LEARNING, *NODES)
    run.until(" 1/6 ")
    first, generator = run.ranks(), run.pid_of("generator")
    assert first.keys() == {0, 1, 2, 3}
    os.kill(first[rank], signal.SIGKILL)
    assert f"(rank {rank} of 4 on node {rank // 2})" in run.until("trainer 0: killed by SIGKILL")
    run.until("resuming after step")
    assert run.pid_of("generator") == generator, "no other worker is started again"
    assert not set(run.ranks().values()) & set(first.values()), "the set is whole"
    hold.unlink()
    assert run.ends().count("it is started again") == 1
    assert_learned_alike(alone, run.curve())


@pytest.mark.whole("sets of ranks, each a process that imports torch")
def test_a_stopped_run_of_four_ranks_goes_on_with_two_and_one(job_file: Path, starting: Callable[..., Started]) -> None:
    hold = hold_rewards(job_file, "2 nodes")
    alone = train(job_file, "alone", *LEARNING)
    for num_steps, grid, num_ranks in ((2, NODES, 4), (4, NODES[:1], 2)):
        hold.write_text(f"{num_steps} nodes")
        run = starting("nodes", *LEARNING, *grid, resume=num_steps > 2)
        run.until(f" {num_steps}/6 ")
        run.process.send_signal(signal.SIGINT)
        run.until("stopping: ")
        hold.unlink()
        run.ends(130)
        newest = max((run.folder / "checkpoints").glob("step-*"))
        parts = {f"learner-{rank:05}-of-{num_ranks:05}" for rank in range(num_ranks)}
        assert {path.stem for path in newest.glob("*.safetensors")} == {"learner", *parts}
    train(job_file, "nodes", *LEARNING, resume=True)
    assert_learned_alike(alone, curve_of(job_file, "nodes"))
