"""Live state of a real run: one process writes it, viewers read it, and no run needs it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from faults.processes import named
from runs import train
from started import TWO, Started, eventually, hold_rewards
from typer.testing import CliRunner

from rlhfspec.cli.main import app

STEPS = "training.steps=2"


@pytest.fixture
def hold(job_file: Path) -> Path:
    return hold_rewards(job_file)


@contextmanager
def asking(run: Started) -> Iterator[redis.Redis]:
    connections = run.connections
    password = (Path(connections["credentials"]) / "redis.password").read_text()
    with redis.Redis.from_url(connections["redis_url"], password=password) as client:
        yield client


def top(run: Started) -> dict[str, list[str]]:
    result = CliRunner().invoke(app, ["top", str(run.folder)])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    return {cells[0]: cells for cells in rows if cells}


def test_the_supervisor_alone_writes_and_top_shows_every_worker(hold: Path, starting: Callable[..., Started]) -> None:
    run = starting("many", STEPS, *TWO)
    run.until("(8 of 8)")
    workers = {
        "prompts-0", "generator-0", "generator-1", "reward-0", "reward-1", "reference-0", "rebalancer-0", "trainer-0"
    }  # fmt: skip
    pids = {name: run.pid_of(*_parts(name)) for name in workers}
    eventually(lambda: _places(run) == {name: str(pid) for name, pid in pids.items()}, "a line for each, with its pid")
    eventually(lambda: top(run)["generator-0"][6], "its load")
    with asking(run) as client:
        mine = client.client_id()
        others = [each for each in client.client_list() if int(each["id"]) != mine]
        assert client.keys() == [f"rlhfspec:{run.connections['uid']}:live".encode()]
    assert len(others) == 1, "the supervisor's: no worker is connected"
    os.kill(pids["reward-1"], signal.SIGSTOP)
    eventually(lambda: top(run)["reward-1"][2] == "held", "what the supervisor knows of a process is shown too")
    os.kill(pids["reward-1"], signal.SIGCONT)
    hold.unlink()
    run.ends()


def _places(run: Started) -> dict[str, str]:
    return {name: cells[1].partition(":")[2] for name, cells in top(run).items()}


def _parts(name: str) -> tuple[str, int]:
    stage, _, worker = name.rpartition("-")
    return stage, int(worker)


def test_a_run_whose_redis_hangs_for_good_goes_on(job_file: Path, hold: Path, starting: Callable[..., Started]) -> None:
    hold.unlink()
    whole = train(job_file, "one", STEPS)
    hold.touch()
    run = starting("many", STEPS)
    run.until("(5 of 5)")
    [pid] = named(run.connections["uid"], "redis")
    os.kill(pid, signal.SIGSTOP)
    hold.unlink()
    run.ends()
    assert run.curve() == whole
