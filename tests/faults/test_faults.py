"""Whole runs of real processes under faults: they end as if nothing had happened, and nothing of them is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from faults import moving
from faults.schedule import schedule
from faults.trial import WORKERS, join_and_leave, trial


def test_a_schedule_is_a_function_of_its_seed_and_strikes_everybody() -> None:
    faults = schedule(3, 200, WORKERS)
    assert faults == schedule(3, 200, WORKERS) != schedule(4, 200, WORKERS)
    assert [fault.after_step for fault in faults] == sorted(fault.after_step for fault in faults)
    kills = Counter(fault.target for fault in faults if fault.kind == "kill")
    assert kills.total() == 200
    assert set(kills) == {*WORKERS, "nats", "redis", "guardian", "launcher", "supervisor"}


@pytest.mark.timeout(900)
def test_a_run_under_forty_kills_is_the_run_without_faults(tmp_path: Path) -> None:
    """Holds and leaves beside them; `make faults` does two hundred."""
    run = trial(tmp_path, 6, 40, print, held_seconds=3.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 40


@pytest.mark.timeout(300)
def test_a_generator_joins_is_cut_off_comes_back_and_leaves(tmp_path: Path) -> None:
    """By hand, with a proxy between it and the server; the curve is that of the run without it."""
    join_and_leave(tmp_path, print)


@pytest.mark.timeout(600)
def test_a_run_under_twenty_kills_in_mid_move_is_the_run_without_them(tmp_path: Path) -> None:
    """`make faults` does three hundred, over shared memory and over TCP with a way that is cut, slow or broken off."""
    run = moving.trial(tmp_path, 1, 20, print, held_seconds=2.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 20
    assert len(run.in_a_move) >= 4
