"""Whole runs under faults end as undisturbed ones and leave nothing."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import lives, moving
from faults.schedule import schedule
from faults.trial import WORKERS, join_and_leave, trial


def test_a_fault_schedule_depends_only_on_its_seed_and_hits_every_target() -> None:
    faults = schedule(3, 200, WORKERS)
    assert faults == schedule(3, 200, WORKERS) != schedule(4, 200, WORKERS)
    assert [fault.after_step for fault in faults] == sorted(fault.after_step for fault in faults)
    kills = Counter(fault.target for fault in faults if fault.kind == "kill")
    assert kills.total() == 200
    assert set(kills) == {*WORKERS, "nats", "redis", "guardian", "launcher", "supervisor"}


def test_strikes_at_the_ends_of_a_run_depend_only_on_the_seed() -> None:
    strikes = [strike for seed in range(100) for life in lives.lives(seed) for strike in life]
    assert lives.lives(7) == lives.lives(7) != lives.lives(8)
    assert {strike.moment for strike in strikes} == set(lives.MOMENTS)
    assert {target for strike in strikes for target in strike.targets} == {*WORKERS, *lives.HELPERS}
    assert {strike.targets for strike in strikes if len(strike.targets) > 1} == set(lives.PAIRS)


def killed(folder: Path) -> None:
    """Run fifteen kills with holds and leaves; `make faults` does two hundred."""
    run = trial(folder, 6, 15, print, held_seconds=3.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 15


def killed_in_moves(folder: Path) -> None:
    """Run eight kills; `make faults` does three hundred, over shared memory and over corrupting TCP."""
    run = moving.trial(folder, 1, 8, print, held_seconds=2.0)
    assert sum(number for what, number in run.struck.items() if what.startswith("kill")) == 8
    assert len(run.in_a_move) >= 2


def joined(folder: Path) -> None:
    join_and_leave(folder, print)


def struck_at_its_ends(folder: Path) -> None:
    """Strike several processes at once, such as supervisor and NATS; `make faults` does two hundred kills."""
    run = lives.trial(folder, 103, print, work_seconds=240.0, slack_seconds=60.0, leave_seconds=60.0)
    assert run.struck.total() >= 3


@pytest.mark.whole("a run under faults")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [killed, killed_in_moves, joined, struck_at_its_ends])
def test_a_run_under_faults_is_the_run_without_them(faults: Callable[[Path], None], tmp_path: Path) -> None:
    faults(tmp_path)
