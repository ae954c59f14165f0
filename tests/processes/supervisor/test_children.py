"""Restarts of workers, with a fake clock and small real processes."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from faults.processes import is_alive, of_run
from interpreters import Interpreters
from small_job import a_job

from rlhfspec.errors import LoopStalled, StageFailed, StageRefused
from rlhfspec.job.roles import FailurePolicy
from rlhfspec.messages.records import Heartbeat, StepReport, WorkerInfo
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.runs.live.run_state import SILENT_SECONDS, HeldNews, KnownRun, ProcessNews
from rlhfspec.runs.view.roster import ProcessState, process_states
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor.child import Child, Process
from rlhfspec.supervisor.children import Children, gone, joined
from rlhfspec.supervisor.restarts import MOST_UNCOUNTED, Restarts
from rlhfspec.worker import exits

BEAT = Heartbeat(
    id="b", job="sums", stage="reward", worker=0, doing="waiting", what="finished samples", since_seconds=2.0,
    overdue_seconds=float("-inf"), busy_seconds=0.0,
)  # fmt: skip
INFO = WorkerInfo(id="i", job="sums", stage="reward", worker=0, host="here", pid=71, grpc_address="", http_address="")
PATIENCE_SECONDS = 60.0


def restarts(**policy: object) -> Restarts:
    return Restarts(FailurePolicy.model_validate(policy), random.Random(0))


def test_restart_delays_double_up_to_the_maximum_and_forget_resets_them() -> None:
    policy = restarts(maxRestarts=9, backoffSeconds=1.0, maxBackoffSeconds=5.0)
    waits = [policy.delay_after("error") or 0.0 for _ in range(6)]
    for wait, most in zip(waits, (1.0, 2.0, 4.0, 5.0, 5.0, 5.0), strict=True):
        assert most / 2 <= wait <= most
    assert len(set(waits)) == 6, "no two wait equally long"
    policy.forget()
    assert (policy.delay_after("error") or 0.0) <= 1.0


def test_restarts_stop_after_max_restarts_and_uncounted_ones_after_a_bound() -> None:
    policy = restarts(maxRestarts=2, counted=["error"])
    assert [policy.delay_after("error") is None for _ in range(3)] == [False, False, True]
    policy = restarts(maxRestarts=0, counted=["error"])
    assert all(policy.delay_after("killed") is not None for _ in range(MOST_UNCOUNTED))
    assert policy.delay_after("killed") is None, "nobody is started for ever"
    assert restarts(maxRestarts=9).delay_after("permanent") is None


def started(known: KnownRun, stage: str, worker: int = 0) -> None:
    known.tell(ProcessNews(stage=stage, worker=worker, phase="starting", pid=71))


def drawn(known: KnownRun) -> dict[str, ProcessState]:
    return {state.name: state for state in process_states(known.run, known.clock.now())}


def test_a_waiting_process_names_the_working_process_that_it_waits_for() -> None:
    known = KnownRun(FakeClock())
    for stage, worker, doing in (("generator", 0, "waiting"), ("generator", 1, "working"), ("reward", 0, "waiting")):
        started(known, stage, worker)
        known.tell(replace(INFO, stage=stage, worker=worker))
        known.tell(replace(BEAT, stage=stage, worker=worker, doing=doing))
    assert drawn(known)["reward 0"].waits_for == ("generator 1",)
    known.tell(replace(BEAT, stage="generator", worker=1))
    assert drawn(known)["reward 0"].waits_for == ("generator",), "all of them wait themselves"


async def test_a_process_without_beats_is_silent_but_a_stopped_one_is_held() -> None:
    known = KnownRun(clock := FakeClock())
    started(known, "reward")
    known.tell(INFO, BEAT)
    await clock.advance(SILENT_SECONDS + 1)
    state = drawn(known)["reward 0"]
    assert (state.doing, state.since_seconds) == ("silent", SILENT_SECONDS + 1)
    assert not known.run.all_run(clock.now()), "who may come back is not waited for in vain"
    known.tell(HeldNews(stage="reward", worker=0, is_held=True))
    await clock.advance(100.0)
    state = drawn(known)["reward 0"]
    assert (state.doing, state.since_seconds) == ("held", 100.0)
    known.tell(HeldNews(stage="reward", worker=0, is_held=False))
    assert drawn(known)["reward 0"].doing == "waiting"


async def test_a_worker_started_by_hand_joins_and_is_dropped_when_silent() -> None:
    known = KnownRun(clock := FakeClock())
    started(known, "generator")
    assert known.run.is_only_worker(("generator", 0))
    assert not joined(known, replace(INFO, stage="generator"))
    assert joined(known, replace(INFO, stage="generator", worker=5))
    assert not joined(known, replace(INFO, stage="generator", worker=5, id="again"))
    assert not known.run.is_only_worker(("generator", 0))
    assert [state.by_hand for state in drawn(known).values()] == [False, True]
    await clock.advance(SILENT_SECONDS + 1)
    assert gone(known) == ["generator 5"]
    assert gone(known) == [], "told once"
    assert known.run.is_only_worker(("generator", 0))


FAILS = """
import json, sys
print(json.dumps({"level": "error", "message": "no digits", "exit_code": %d}), file=sys.stderr)
sys.exit(%d)
"""
FULL = (FAILS % (1, 1)).replace("no digits", "storage full: out/checkpoints: No space left on device")
LEAVES = """
import json, signal, sys, time

def leave(*_):
    print(json.dumps({"level": "info", "message": "left: it was asked to", "exit_code": 0}), flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
print("I am there", flush=True)
while True: time.sleep(60)
"""
LIVES = "import time\nwhile True: time.sleep(60)"


class Run:
    def __init__(self, tmp_path: Path, programs: dict[tuple[str, int], str], **policy: object) -> None:
        self.tmp_path = tmp_path
        self.job = a_job(failurePolicy={"backoffSeconds": 0.01, "maxBackoffSeconds": 0.01} | policy)
        self.programs = programs
        self.said: list[str] = []
        self.done = False

    async def open(self, *, stall_seconds: float = 300.0) -> Children:
        self.clock = FakeClock()
        workers = {"prompts": 1, "generator": 2, "reward": 1, "trainer": 1, "view": 1}
        self.bus = await Bus.open(MemoryTransport(clock=self.clock), "sums", workers=workers, clock=self.clock)
        starter = Interpreters(os.environ | {"RLHFSPEC_RUN": self.tmp_path.name, "NOTES": str(self.tmp_path)})
        self.children = {
            (stage, worker): Child(
                stage, worker, ["-c", program], starter, self.tmp_path / f"{stage}-{worker}.jsonl",
                activity=self.tmp_path / f"{stage}-{worker}",
            )
            for (stage, worker), program in self.programs.items()
        }  # fmt: skip
        told = {"is_done": self._is_done, "known": KnownRun(self.clock), "say": self.said.append}
        all_of_them = list(self.children.values())
        return Children(self.bus, Vitals(self.clock), all_of_them, job=self.job, stall_seconds=stall_seconds, **told)

    async def _is_done(self) -> bool:
        return self.done

    async def ready(self, stage: str, worker: int = 0) -> None:
        await self.bus.publish(replace(INFO, id=f"{stage}{worker}", stage=stage, worker=worker))

    async def trained(self, step: int) -> None:
        await self.bus.publish(StepReport(id=f"sums/{step}", job="sums", metrics=example_step(step=step)))
        await self.clock.settle()

    async def begun(self, children: Children) -> asyncio.Task[None]:
        starting = asyncio.create_task(children.start())
        await self.until(lambda: all(child.pid for child in self.children.values()))
        for stage, worker in self.children:
            await self.ready(stage, worker)
        await self.until(starting.done)
        return asyncio.create_task(children.run())

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end, self.said
            await self.clock.advance(0.1)
            await asyncio.sleep(0.01)

    async def fails(self, task: asyncio.Task[None], match: str, error: type[Exception] = StageFailed) -> None:
        await self.until(task.done)
        with pytest.raises(error, match=match):
            task.result()


@asynccontextmanager
async def opened(run: Run, **settings: float) -> AsyncIterator[Children]:
    children = await run.open(**settings)
    try:
        yield children
    finally:
        await children.end()


@pytest.mark.parametrize(
    ("stage", "exit_codes", "error", "match", "num_restarts"),
    [
        ("reward", (1, 1), StageFailed, "reward 0: failed: no digits; 3 failures since step 0", 2),
        ("reward", (78, 78), StageRefused, r"^no digits$", 0),
        ("trainer", (78, 1), StageRefused, r"^no digits$", 0),
    ],
    ids=["as often as the policy says", "not where the job has to change", "by the worker's code, not torchrun's"],
)
async def test_a_worker_that_fails_is_started_again(
    tmp_path: Path, stage: str, exit_codes: tuple[int, int], error: type[Exception], match: str, num_restarts: int
) -> None:
    run = Run(tmp_path, {(stage, 0): FAILS % exit_codes, ("prompts", 0): LIVES}, maxRestarts=2)
    async with opened(run) as children:
        await run.fails(asyncio.create_task(children.start()), match, error)
        assert [line for line in run.said if "no digits; it is started again" in line] == run.said
        assert len(run.said) == num_restarts


async def test_a_killed_worker_comes_back_and_the_trainers_end_ends_the_run(tmp_path: Path) -> None:
    """One generator leaves on purpose; the only trainer, asked to leave from outside, is restarted."""
    run = Run(tmp_path, {("generator", 0): LIVES, ("generator", 1): LIVES, ("trainer", 0): LEAVES})
    async with opened(run) as children:
        running = await run.begun(children)
        generator, trainer = run.children["generator", 0], run.children["trainer", 0]
        before = generator.pid
        os.kill(before or 0, signal.SIGKILL)
        await run.until(lambda: generator.pid not in (None, before))
        assert "generator 0: killed by SIGKILL; it is started again in 0.0 s" in run.said
        log = tmp_path / "trainer-0.jsonl"
        await run.until(lambda: log.read_text().count("there") == 1)
        before = trainer.pid
        os.kill(before or 0, signal.SIGTERM)
        await run.until(lambda: trainer.pid not in (None, before) and log.read_text().count("there") == 2)
        run.done = True
        os.kill(trainer.pid or 0, signal.SIGTERM)
        await run.until(running.done)
        running.result()
        assert not any(child.pid for child in run.children.values())


async def test_a_killed_worker_counts_as_ended_once_its_own_processes_have_ended(tmp_path: Path) -> None:
    """The kernel takes a while to take back the memory of the second one."""
    large = "import time\nheld = bytearray(b'1') * (1 << 29)\nprint('held', flush=True)\ntime.sleep(99)"
    run = Run(tmp_path, {("reward", 0): f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {large!r}])"})
    async with opened(run):
        child = run.children["reward", 0]
        await child.start()
        await run.until(lambda: "held" in (tmp_path / "reward-0.jsonl").read_text())
        both = of_run(tmp_path.name)
        os.kill(child.pid or 0, signal.SIGKILL)
        assert (await child.wait()).reason == "killed by SIGKILL"
        assert len(both) == 2
        assert not any(map(is_alive, both))


async def test_the_start_does_not_wait_for_a_worker_that_left_meanwhile(tmp_path: Path) -> None:
    run = Run(tmp_path, {("generator", 0): LIVES, ("generator", 1): LEAVES, ("trainer", 0): LIVES})
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        log = tmp_path / "generator-1.jsonl"
        await run.until(lambda: log.exists() and log.read_text())
        run.children["generator", 1].ask_to_leave()
        await run.until(lambda: "generator 1 left: another program stopped it" in run.said)
        await run.ready("generator")
        await run.until(lambda: children.known.run.workers["generator", 0].info)
        assert not starting.done(), "the trainer is awaited"
        await run.ready("trainer")
        await run.until(starting.done)
        starting.result()


async def test_work_past_its_deadline_kills_its_process_and_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, {("reward", 0): LIVES, ("trainer", 0): LIVES}, maxRestarts=0)
    async with opened(run) as children:
        running = await run.begun(children)
        late = replace(BEAT, doing="working", what="reward of sums/3/7/1", since_seconds=66.0, overdue_seconds=6.0)
        await run.bus.publish(late)
        await run.fails(running, "reward 0: failed: stalled: reward of sums/3/7/1 takes 66 s, longer")


async def test_a_run_whose_workers_all_wait_ends_and_the_error_names_each_wait(tmp_path: Path) -> None:
    run = Run(tmp_path, {("reward", 0): LIVES, ("trainer", 0): LIVES})
    async with opened(run, stall_seconds=20.0) as children:
        running = await run.begun(children)
        for number in range(30):
            for stage in ("reward", "trainer"):
                await run.bus.publish(replace(BEAT, id=str(number), stage=stage))
            await run.clock.advance(1.0)
        await run.fails(running, "reward 0 waits for finished samples, from prompts or generator", LoopStalled)


async def test_a_trained_step_resets_the_failure_count(tmp_path: Path) -> None:
    run = Run(tmp_path, {("reward", 0): FAILS % (1, 1)}, maxRestarts=1)
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        for step in range(1, 5):
            await run.until(lambda step=step: len(run.said) >= step)
            await run.trained(step)
        await run.fails(starting, "since step 4")


async def test_a_repeated_step_does_not_reset_the_failure_count(tmp_path: Path) -> None:
    """Steps 1 to 3, repeated after a failure at step 4, do not reset the failure count."""
    run = Run(tmp_path, {("trainer", 0): FAILS % (1, 1)}, maxRestarts=3)
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        while not starting.done():
            num_failures = len(run.said)
            assert num_failures < 8, "it is started for ever"
            for step in range(1, 4):
                await run.trained(step)
            await run.until(lambda before=num_failures: len(run.said) > before or starting.done())
        await run.fails(starting, "no digits; 4 failures since step 3")


@pytest.mark.parametrize("begun", [False, True])
async def test_a_full_disk_ends_the_run_at_the_first_failure(tmp_path: Path, begun: bool) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(.01)\n"
    run = Run(tmp_path, {("trainer", 0): waits + FULL})
    async with opened(run) as children:
        ended = await run.begun(children) if begun else asyncio.create_task(children.start())
        go.touch()
        await run.fails(ended, "trainer 0: failed: storage full: out/checkpoints: No space left")
        assert run.said == ["trainer 0 is ready (1 of 1)"][:begun]


STARTING = 'print(\'{"level": "info", "message": "starting"}\', flush=True)\n'
AT_WORK = "from rlhfspec.worker.last_words import ActivityFile\nfrom pathlib import Path\nimport os\n" + STARTING
AT_WORK += "note = os.environ['NOTES'] + '/' + os.environ['RLHFSPEC_WORKER']\n"
AT_WORK += "ActivityFile(Path(note))('scoring sums/1/0/1 with source digits')\n"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (
            "os._exit(0)",
            "ended with exit code 0 while scoring sums/1/0/1 with source digits, without being asked to stop",
        ),
        ("os._exit(5)", "ended with exit code 5 while scoring sums/1/0/1 with source digits; "),
        ("raise KeyError('x')", "ended with exit code 1 while scoring sums/1/0/1 with source digits: KeyError: 'x'"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV while scoring sums/1/0/1 with source digits; "),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL while scoring sums/1/0/1 with source digits; "),
    ],
)
async def test_process_that_ends_is_restarted_and_its_last_work_reported(tmp_path: Path, end: str, reason: str) -> None:
    run = Run(tmp_path, {("reward", 0): AT_WORK + end, ("reward", 1): LIVES})
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        await run.until(lambda: run.said)
        assert reason in run.said[0]
        assert "it is started again in" in run.said[0]
        starting.cancel()


async def test_a_worker_killed_for_memory_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's count of out-of-memory kills rose while the worker lived."""
    counters = tmp_path / "vmstat"
    counters.write_text("drop_slab 0\noom_kill 3\nnuma_hit 71\n")
    monkeypatch.setattr(exits, "num_killed_for_memory", partial(exits.num_killed_for_memory, counters))
    program = f"open({str(counters)!r}, 'w').write('drop_slab 0\\noom_kill 4\\n')\nos.kill(os.getpid(), 9)"
    run = Run(tmp_path, {("reward", 0): AT_WORK + program, ("reward", 1): LIVES})
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        await run.until(lambda: len(run.said) > 1)
        at = "scoring sums/1/0/1 with source digits; it is started again"
        assert run.said[0].startswith(f"reward 0: killed by SIGKILL as memory ran out while {at}")
        assert run.said[1].startswith(f"reward 0: killed by SIGKILL while {at}"), "it did not go up again"
        starting.cancel()


async def test_the_last_error_of_a_process_is_reported_when_its_log_is_full(tmp_path: Path) -> None:
    words = json.dumps({"message": "storage full: out/samples.jsonl: No space left on device", "exit_code": 1})
    program = f"open(note + '.end', 'w').write({words!r})\nos._exit(1)"
    run = Run(tmp_path, {("trainer", 0): AT_WORK + program})
    async with opened(run) as children:
        starting = asyncio.create_task(children.start())
        await run.fails(starting, "trainer 0: failed: storage full: out/samples.jsonl: No space left")


async def test_a_silent_process_is_killed_and_its_current_work_is_reported(tmp_path: Path) -> None:
    """The worker's call holds the interpreter's lock."""
    run = Run(tmp_path, {("reward", 0): AT_WORK + LIVES}, maxRestarts=0)
    run.job = a_job(roles={"reward": {"deadlineSeconds": 5}}, failurePolicy={"maxRestarts": 0})
    async with opened(run) as children:
        running = await run.begun(children)
        note = tmp_path / "reward-0"
        await run.until(lambda: note.exists() and note.read_bytes())
        await run.fails(running, r"no heartbeat for \d+ s while scoring sums/1/0/1 with source digits")


class Once(Interpreters):
    is_starting = False

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Process:
        if log.exists():
            self.is_starting = True
            await asyncio.Event().wait()
        return await super().start(name, arguments, log)


@pytest.mark.parametrize("how", ["the trainer is done", "Ctrl-C"])
@pytest.mark.parametrize("delay", [1e6, 0.01])
async def test_a_worker_due_for_a_restart_does_not_delay_the_end_of_the_run(
    tmp_path: Path, how: str, delay: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends while a worker waits for its restart, or is being started."""
    run = Run(tmp_path, {("reward", 0): LIVES, ("trainer", 0): LEAVES}, backoffSeconds=delay, maxBackoffSeconds=delay)
    async with opened(run) as children:
        reward, trainer = run.children["reward", 0], run.children["trainer", 0]
        reward._starter = once = Once(reward._starter.environment)
        running = await run.begun(children)
        os.kill(reward.pid or 0, signal.SIGKILL)
        await run.until(lambda: run.said and "reward 0: killed by SIGKILL" in run.said[-1])
        await run.until(lambda: once.is_starting or delay > 1.0)
        run.done = True
        if how == "Ctrl-C":
            await children.stop()
        else:
            await run.until(lambda: "there" in (tmp_path / "trainer-0.jsonl").read_text())
            os.kill(trainer.pid or 0, signal.SIGTERM)
        await run.until(running.done)
        running.result()
        assert "did not stop within" not in caplog.text


def test_a_hung_call_does_not_keep_the_process_alive() -> None:
    code = (
        "import asyncio, threading\n"
        "from rlhfspec.stage.threads import ComputeThread\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    hang = lambda: (begun.set(), threading.Event().wait())\n"
        "    call = asyncio.create_task(ComputeThread('x').in_thread(hang))\n"
        "    while not begun.is_set(): await asyncio.sleep(0)\n"
        "    call.cancel()\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
