"""Ranks of a trainer, two nodes of two with tensor parallelism, are killed while they learn."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from started import PATIENCE_SECONDS, Started, eventually

GRID = ("roles.trainer.nodes=2", "roles.trainer.ranksPerNode=2", "roles.trainer.tensorParallel=2")
QUICKLY = ("failurePolicy.backoffSeconds=0.05", "failurePolicy.maxBackoffSeconds=0.05")


def at_once(run: Started, ranks: dict[int, int], rank: int) -> None:
    """Strike while a step is written or the next one generated."""


def in_a_checkpoint(run: Started, ranks: dict[int, int], rank: int) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not list((run.folder / "checkpoints").glob(".writing-*")):  # it is there for a few milliseconds
        assert time.monotonic() < end, "no checkpoint was begun"


def in_an_exchange(run: Started, ranks: dict[int, int], rank: int) -> None:
    """Wait until all others wait for a rank: the one that is killed, or with it."""
    missing = rank or 1
    os.kill(ranks[missing], signal.SIGSTOP)
    before: list[str] = []

    def all_wait() -> bool:
        nonlocal before
        time.sleep(0.2)
        now = [seconds_of(pid) for other, pid in ranks.items() if other != missing]
        before, last = now, before
        return now == last

    eventually(all_wait, "ranks waited for another")


def seconds_of(pid: int) -> str:
    return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])


NUM_STEPS = 60  # more than are needed: the run goes on while a moment is looked for
A_STEP = f"/{NUM_STEPS} "
Moment = Callable[[Started, dict[int, int], int], None]
STRIKES: tuple[tuple[tuple[int, Moment], ...], ...] = (
    ((0, in_a_checkpoint), (3, in_an_exchange), (2, in_a_checkpoint), (1, at_once), (0, in_an_exchange)),
    ((3, in_a_checkpoint), (1, in_an_exchange), (0, at_once), (2, in_an_exchange), (1, in_a_checkpoint)),
)


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strikes", STRIKES)
def test_ranks_killed_one_after_the_other_leave_the_curve_of_a_run_without(
    job_file: Path, starting: Callable[..., Started], strikes: tuple[tuple[int, Moment], ...]
) -> None:
    learning = (f"training.steps={NUM_STEPS}", "training.optimizer.learningRate=1e-4", "checkpoint.everySteps=1")
    whole = starting("whole", *learning, *GRID)
    run = starting("struck", *learning, *GRID, *QUICKLY)
    run.until(A_STEP)
    generator, before = run.pid_of("generator"), set[int]()
    for rank, moment in strikes:
        struck = eventually(lambda: whole_set(run, before), "all ranks of a set")
        moment(run, struck, rank)
        os.kill(struck[rank], signal.SIGKILL)
        assert f"(rank {rank} of 4 on node {rank // 2})" in run.until("trainer 0: killed by SIGKILL")
        run.until(A_STEP)
        assert run.pid_of("generator") == generator
        before.update(struck.values())
    assert left(run).count("it is started again") == len(strikes), "nothing else was"
    curve = run.curve()
    if len(whole.curve()) < len(curve):
        whole.until(f" {len(curve)}/{NUM_STEPS} ")
    left(whole)
    assert len(curve) > 1
    assert curve == whole.curve()[: len(curve)]


def whole_set(run: Started, before: set[int]) -> dict[int, int] | None:
    ranks = run.ranks()
    return ranks if len(ranks) == 4 and not before & set(ranks.values()) else None


def left(run: Started) -> str:
    run.process.send_signal(signal.SIGINT)
    code, output = run.ended()
    assert code in (0, 130), output
    return output
