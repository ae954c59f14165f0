"""The time in which a process was stopped counts for no deadline."""

import itertools
import signal
import subprocess
import sys
import time

import pytest

from rlhfspec.common.awake_clock import AwakeClock


def test_an_awake_clock_passes_over_what_nobody_worked_in() -> None:
    passed, computed = [100.0], [0.0]
    clock = AwakeClock(stopped_seconds=5.0, passed=lambda: passed[0], computed=lambda: computed[0])
    seen = [clock.now()]
    for seconds, worked in ((1.0, 0.0), (4.0, 0.1), (7200.0, 0.0), (1.0, 0.0), (60.0, 30.0), (6.0, 0.1), (1.0, 1.0)):
        passed[0] += seconds
        computed[0] += worked
        seen.append(clock.now())
    spent = [after - before for before, after in itertools.pairwise(seen)]
    assert spent == [1.0, 4.0, 0.0, 1.0, 60.0, 0.0, 1.0], "two hours, and 6 s without work, were a stop; 60 s were not"


STOPPED_RUN = """
import asyncio, time
from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.stage.base import Service
from rlhfspec.stage.supervisor import Supervisor
from rlhfspec.stage.vitals import Vitals

class Slow(Service):
    async def run(self):
        with {activity}:
            began = time.monotonic()
            print("begun", flush=True)
            while time.monotonic() - began < 3.0:
                await asyncio.sleep(0.05)
            for _ in range(10):  # the supervisor looks again
                await asyncio.sleep(0.05)
        print(self.vitals.state().busy_seconds < 2.0)

vitals = Vitals(AwakeClock(stopped_seconds=0.5))
supervisor = Supervisor(vitals, stall_seconds=2.0, check_seconds=0.05)
asyncio.run(supervisor.run([Slow("trainer", 0, vitals)], asyncio.Event()))
"""


@pytest.mark.parametrize("activity", ['self.vitals.working("x", deadline_seconds=2.0)', 'self.vitals.waiting("x")'])
def test_a_process_that_was_stopped_has_not_stalled(activity: str) -> None:
    code = STOPPED_RUN.format(activity=activity)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # longer than the deadline, in the only clock that a stopped process has
    process.send_signal(signal.SIGCONT)
    said, problems = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "True\n"), problems
