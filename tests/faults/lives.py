"""Short runs struck at start, checkpoint, evaluation, last step, Ctrl-C and resume; the curve must not change."""

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import warmed
from runs import train, with_spec
from started import hold_rewards

from faults import processes
from faults.harness import LOOK_SECONDS, Disturbed, FaultyRun
from faults.schedule import SUPERVISOR
from faults.trial import OVERRIDES, WORKERS, again, check, written
from rlhfspec.cli.signals import FAILED, STOPPED

Moment = Literal["start", "step", "checkpoint", "evaluation", "last step", "end", "Ctrl-C"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "checkpoint", "evaluation", "last step", "end", "Ctrl-C")
NUM_STEPS, EVALUATE_EVERY, CHECKPOINT_EVERY = 9, 3, 2
BUSY_SECONDS = 0.002  # between two looks for what is there for some milliseconds
HELPERS = ("nats", "redis", "guardian", "guardians", "launcher", SUPERVISOR)
PAIRS = (
    (SUPERVISOR, "guardian"), (SUPERVISOR, "guardians"), (SUPERVISOR, "launcher"), (SUPERVISOR, "nats"),
    ("guardians", "launcher"), ("launcher", "trainer-0"), ("launcher", "reward-0"), ("launcher", "generator-0"),
    ("nats", "trainer-0"), ("nats", "redis"), ("guardian", "prompts-0"),
)  # fmt: skip
SHARE_OF_PAIRS, SHARE_OF_HELPERS = 0.3, 0.4  # of strikes; the rest are single workers
NAMED_END = re.compile(r"failed after \d+ steps?: \w+( \d+)?: ")


@dataclass(frozen=True, slots=True)
class Strike:
    moment: Moment
    delay_seconds: float
    targets: tuple[str, ...]


def lives(seed: int) -> list[list[Strike]]:
    """Return the strikes of each life of one run, a pure function of the seed.

    >>> lives(3)[0][0]
    Strike(moment='start', delay_seconds=2.15, targets=('redis',))
    """
    draw = random.Random(f"lives {seed}")
    return [sorted((_strike(draw) for _ in range(draw.randint(1, 3))), key=_order) for _ in range(3)]


def _order(strike: Strike) -> int:
    return MOMENTS.index(strike.moment)


def _strike(draw: random.Random) -> Strike:
    moment, kind = draw.choice(MOMENTS), draw.random()
    if kind < SHARE_OF_PAIRS:
        targets = draw.choice(PAIRS)
    else:
        targets = (draw.choice(HELPERS if kind < SHARE_OF_PAIRS + SHARE_OF_HELPERS else WORKERS),)
    longest = {"start": 4.0, "end": 2.0, "checkpoint": 0.02}.get(moment, 0.5)
    return Strike(moment, round(draw.uniform(0.0, longest), 2), targets)


class StruckRun(FaultyRun):
    """A struck run. `limit_seconds`: longest life; `leave_seconds`: until nothing of it is left."""

    limit_seconds = 600.0
    leave_seconds = 60.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.life_seconds: list[float] = []
        self.ends: Counter[str] = Counter()
        self._interrupted = False
        self._unguarded = False
        (self.out.parent / "tmp").mkdir()
        self.environment = {"TMPDIR": str(self.out.parent / "tmp"), warmed.DRAWS: "1"}  # its end is struck too

    def live(self, strikes: Sequence[Strike]) -> bool:
        """Run one life and return whether the run completed. Scoring waits for the strikes at its start."""
        hold = self.out.parent / "hold"
        self._start()
        began = time.monotonic()
        self._interrupted = self._unguarded = False
        for strike in strikes:
            hold.touch() if strike.moment == "start" else hold.unlink(missing_ok=True)
            if not self._await_moment(strike, began) or not self._hit(strike):
                break
        hold.unlink(missing_ok=True)
        while self._ended() is None:
            self._look(began)
            time.sleep(LOOK_SECONDS)
        self.life_seconds.append(time.monotonic() - began)
        self._judge()
        return self._ended() == 0

    def _await_moment(self, strike: Strike, began: float) -> bool:
        come = {
            "start": lambda: True,
            "step": lambda: self.num_steps >= 1,
            "checkpoint": lambda: any((self.out / "checkpoints").glob(".writing-*")),
            "evaluation": self._is_evaluating,
            "last step": lambda: self.num_steps >= NUM_STEPS - 1,
            "end": lambda: self.num_steps >= NUM_STEPS,
            "Ctrl-C": lambda: self.num_steps >= 1,
        }[strike.moment]
        while not come():
            self._look(began)
            if self._ended() is not None or (self.num_steps >= NUM_STEPS and strike.moment != "end"):
                return False
            time.sleep(BUSY_SECONDS)
        if strike.moment == "Ctrl-C" and self._supervisor is not None:
            self._interrupted = True
            self._supervisor.send_signal(signal.SIGINT)
        end = time.monotonic() + strike.delay_seconds
        while time.monotonic() < end and self._ended() is None:
            self._look(began)
            time.sleep(BUSY_SECONDS)
        return self._ended() is None

    def _is_evaluating(self) -> bool:
        done = [0]
        with suppress(OSError, ValueError):
            done += [json.loads(line)["step"] for line in (self.out / "evaluations.jsonl").read_text().splitlines()]
        return self.num_steps >= max(done) + EVALUATE_EVERY

    def _hit(self, strike: Strike) -> bool:
        """Strike all targets at once; return False if it hit the supervisor, or no process."""
        uid = self._uid()
        found = [pid for target in strike.targets if uid and target != SUPERVISOR for pid in self._pids(uid, target)]
        if SUPERVISOR in strike.targets:
            self._supervisor.send_signal(signal.SIGKILL)
            self._unguarded = "guardians" in strike.targets
        for pid in found:
            processes.send(pid, signal.SIGKILL)
        self.struck.update(strike.targets)
        self._say(f"step {self.num_steps}: {strike.moment}: {', '.join(strike.targets)} ({len(found)} processes)")
        return SUPERVISOR not in strike.targets

    def _pids(self, uid: str, target: str) -> list[int]:
        found = processes.named(uid, "guardian" if target == "guardians" else target)
        return found[:1] if target == "guardian" else found

    def _look(self, began: float) -> None:
        self._uid()
        if time.monotonic() - began > self.limit_seconds:
            raise Disturbed(f"it has not ended after {self.limit_seconds:.0f} s:\n{self._last_words()}")

    def _judge(self) -> None:
        code, words = self._ended(), self._last_words()
        named = bool(NAMED_END.search(words)) and "Traceback" not in words
        right = code in (0, -signal.SIGKILL) or (code == FAILED and named) or (code == STOPPED and self._interrupted)
        if not right:
            raise Disturbed(f"it ended with exit code {code}:\n{words}")
        self.ends[{0: "completed", FAILED: "failed", STOPPED: "stopped"}.get(code or 0, "killed")] += 1
        if not self._unguarded:
            self._until_gone(self.leave_seconds)
            left = [*(self.out.parent / "tmp").iterdir()]
            if left:
                raise Disturbed(f"left behind: {left}")
        self._log.rename(self._log.with_suffix(f".{sum(self.ends.values())}.log"))


def trial(
    folder: Path,
    seed: int,
    say: Callable[[str], None],
    *,
    work_seconds: float,
    slack_seconds: float,
    leave_seconds: float,
) -> StruckRun:
    job = a_job(folder)
    overrides = [*OVERRIDES, f"training.steps={NUM_STEPS}", f"checkpoint.everySteps={CHECKPOINT_EVERY}"]
    undisturbed = train(job, "undisturbed", *overrides)
    run = StruckRun(job, folder / "faults", overrides, say)
    run.limit_seconds, run.leave_seconds = work_seconds + slack_seconds, leave_seconds
    try:
        with again(seed, "--lives"):
            if not any(run.live(strikes) for strikes in [*lives(seed), []]):
                raise Disturbed("it was never completed")
            check(job, undisturbed)
    finally:
        run.clean_up()
    return run


def work_seconds(folder: Path) -> float:
    run = StruckRun(a_job(folder), folder / "faults", [*OVERRIDES, f"training.steps={NUM_STEPS}"], print)
    try:
        run.live([])
    finally:
        run.clean_up()
    return run.life_seconds[0]


def a_job(folder: Path) -> Path:
    job = written(folder, name="ppo", samplesPerPrompt=2)
    with_spec(job, evaluation={"everySteps": EVALUATE_EVERY, "path": "data.jsonl"})
    hold_rewards(job).unlink()
    return job
