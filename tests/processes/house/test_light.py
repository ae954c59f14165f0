"""Modules that must not import torch, and time in which a process was stopped."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.messages.loop import SUPERVISED

WORDS = [
    *(f"rlhfspec.{stage.name}.build" for stage in SUPERVISED), "rlhfspec.gateway.service",
    *(f"rlhfspec.stage.{name}" for name in ("bus", "context", "supervisor")),
    "rlhfspec.messages.wire.codec", "rlhfspec.messages.transport.memory", "rlhfspec.engine", "rlhfspec.cli.main",
    "rlhfspec.bench.commands.models",
]  # fmt: skip
VIEW = [f"rlhfspec.runs.{name}" for name in ("view.view", "view.summary", "folder.trackers")]


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (WORDS, {"torch", "transformers"}),
        (["rlhfspec.plugin.main"], {"torch", "kubernetes", "grpc"}),
        (VIEW, {"torch", "matplotlib", "tensorboard"}),
    ],
    ids=["words", "plugin", "view"],
)
def test_light_modules_import_none_of_the_heavy_ones(modules: list[str], without: set[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({without} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_wrappers_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import rlhfspec.kernels.kv_pack, rlhfspec.kernels.tree_attention"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_command_imports_torch_or_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    code = (
        "import sys; from typer.testing import CliRunner; from rlhfspec.cli.main import app\n"
        "for words in sys.argv[1:]:\n"
        "    assert CliRunner().invoke(app, words.split()).exit_code == 0, words\n"
        "sys.exit(bool({'torch', 'transformers', 'rlhfspec.bench.commands'} & set(sys.modules)))"
    )
    job = tmp_path / "job.yaml"
    init = f"init {job} --model ./model --data ./train.jsonl"
    commands = ["--help", init, f"validate {job}", f"init {job} --force", f"validate {job}", "schema", "schema --crd"]
    subprocess.run([sys.executable, "-c", code, *commands], check=True, timeout=60)


def test_an_awake_clock_skips_long_gaps_without_work() -> None:
    passed, computed = [100.0], [0.0]
    clock = AwakeClock(stopped_seconds=5.0, passed=lambda: passed[0], computed=lambda: computed[0])
    seen = [clock.now()]
    for seconds, worked in ((1.0, 0.0), (4.0, 0.1), (7200.0, 0.0), (1.0, 0.0), (60.0, 30.0), (6.0, 0.1), (1.0, 1.0)):
        passed[0] += seconds
        computed[0] += worked
        seen.append(clock.now())
    spent = [after - before for before, after in itertools.pairwise(seen)]
    assert spent == [1.0, 4.0, 0.0, 1.0, 60.0, 0.0, 1.0], "two hours, and 6 s without work, were a stop; 60 s were not"


async def test_a_sleep_without_other_reads_of_the_clock_counts_as_time() -> None:
    clock = AwakeClock(stopped_seconds=1.0)
    began = clock.now()
    await clock.sleep(2.0)
    assert clock.now() - began > 1.9


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
def test_a_process_paused_by_sigstop_has_not_stalled(activity: str) -> None:
    code = STOPPED_RUN.format(activity=activity)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # longer than the deadline, in the only clock that a stopped process has
    process.send_signal(signal.SIGCONT)
    said, problems = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "True\n"), problems
