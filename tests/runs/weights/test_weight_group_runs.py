"""Weights by process group in whole runs keep the store's curve and samples, whatever happens to a member."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import train
from started import TWO, Started, eventually, hold_rewards

GROUP = "roles.generator.weights=group"


def told(run: Started, stage: str, words: str) -> int:
    lines = [line for log in (run.folder / "logs").glob(f"{stage}-*.jsonl") for line in log.read_text().splitlines()]
    return sum(words in json.loads(line)["message"] for line in lines)


def test_weights_by_group_give_curve_and_samples_of_the_store(job_file: Path, starting: Callable[..., Started]) -> None:
    hold, steps = hold_rewards(job_file), "training.steps=4"
    hold.unlink()
    whole = train(job_file, "one", steps)
    hold.touch()
    run = starting("many", steps, *TWO, GROUP)
    run.until("(8 of 8)")
    eventually(lambda: told(run, "trainer", "2 generators want them by group"), "both are in")
    hold.unlink()
    run.ends()
    run.check_alike(whole)
    assert told(run, "trainer", "to 2 generators by group") >= 4
    assert told(run, "generator", "by the group") >= 8


def test_auto_takes_weights_from_the_store_on_a_cpu(job_file: Path, starting: Callable[..., Started]) -> None:
    run = starting("many", "training.steps=2", "roles.generator.weights=auto")
    run.ends()
    assert not told(run, "trainer", "by group"), "on a CPU files are quicker"


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
def test_two_ranks_send_shares_while_a_generator_is_killed(job_file: Path, starting: Callable[..., Started]) -> None:
    hold, steps = hold_rewards(job_file), "training.steps=3"
    ranks = "roles.trainer.ranksPerNode=2"
    stores = starting("one", steps, *TWO, ranks)
    hold.unlink()
    assert stores.ended()[0] == 0
    hold.touch()
    run = starting("many", steps, *TWO, ranks, GROUP)
    run.until("(8 of 8)")
    eventually(lambda: told(run, "trainer", "2 generators want them by group"), "both are in")
    stopped, one_is_in = run.pid_of("generator", 1), "1 generators want them by group"
    before = told(run, "trainer", one_is_in)  # where one of them came before the other
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: told(run, "trainer", one_is_in) > before, "the other is in no group")
    hold.unlink()
    eventually(lambda: told(run, "trainer", "version 1 went to 1 generators by group"), "nobody waits for it")
    os.kill(stopped, signal.SIGKILL)
    run.ends()
    run.check_alike(stores.curve())
