"""State of a run in its control process. A restart recovers it within seconds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rlhfspec.cluster.report import Report
from rlhfspec.control.troubles import Failing, TroubleEvidence, broker_unavailable, failing, stalled, undeliverable
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Heartbeat, StepReport, WorkerInfo
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.runs.live.run_state import GONE_SECONDS, SILENT_SECONDS, KnownRun, ProcessNews, RunWorker, WorkerKey
from rlhfspec.runs.view.roster import process_states
from rlhfspec.stage.supervisor import STAGE_NAMES, STALL_SECONDS

AWAY_SECONDS = 3.5  # the broker is pinged every second
MOST_LETTERS = 12
_MOST_TROUBLES = 16  # in a report
RECENT_STEPS = 16  # for the estimate of the remaining time
log = logging.getLogger("rlhfspec.stage")


class RunKnowledge:
    """State of a run. `known` holds its workers; `today` returns the time of day."""

    def __init__(
        self,
        job: RLHFJob,
        run: str,
        broker: str,
        clock: Clock,
        *,
        stall_seconds: float = STALL_SECONDS,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.known = KnownRun(clock)
        self._job, self._run, self._broker = job, run, broker
        self._clock, self._today = clock, today
        self._stall_seconds = stall_seconds
        self._total_steps = job.spec.training.steps
        self._steps: tuple[StepMetrics, ...] = ()
        self._checkpoint_step = 0
        self._stepped_at = clock.now()
        self._there: set[WorkerKey] = set()  # with heartbeats, and not stopped
        self._infos: dict[WorkerKey, WorkerInfo] = {}  # latest per worker, perhaps of a dead process
        self._failing: dict[WorkerKey, Failing] = {}
        self._letters: list[str] = []
        self._logged: frozenset[str] = frozenset()  # troubles of the last report
        self._answered_at = clock.now()
        self._answered_today = today()
        self._answers_since: float | None = None  # start of the unbroken answers

    # --- inputs --------------------------------------------------------------------------------------------------

    def broker_answered(self) -> None:
        now = self._clock.now()
        if self._is_broker_away() or self._answers_since is None:
            self._answers_since = now
        self._answered_at, self._answered_today = now, self._today()

    def heard(self, beat: Heartbeat) -> None:
        key = (beat.stage, beat.worker)
        if beat.stage not in STAGE_NAMES:
            return
        if beat.doing == "stopped":
            return self._left(key, beat.what)
        if key not in self._there:
            self._there.add(key)
            self.known.tell(ProcessNews(stage=beat.stage, worker=beat.worker, phase="starting"))
            if key in self._infos:
                self.known.tell(self._infos[key])
        self.known.tell(beat)
        if not beat.trouble:
            self._failing.pop(key, None)
        elif key not in self._failing:
            self._failing[key] = Failing(beat.trouble, self._clock.now())

    def ready(self, info: WorkerInfo) -> None:
        """Record a worker's info. Only heartbeats make the worker present, because the broker replays old records."""
        key = (info.stage, info.worker)
        if info.stage in STAGE_NAMES:
            self._infos[key] = info
            if key in self._there:
                self.known.tell(info)

    def read(self, info: DatasetInfo) -> None:
        steps = self._job.spec.training.steps
        self._total_steps = min(info.last_step, steps) if info.last_step else steps

    def stepped(self, report: StepReport) -> None:
        self.found([report.metrics])
        self._stepped_at = self._clock.now()

    def found(self, steps: Sequence[StepMetrics]) -> None:
        """Record steps, which replace all known steps from the first of them on."""
        if steps:
            before = tuple(metrics for metrics in self._steps if metrics.step < steps[0].step)
            self._steps = (*before, *steps)[-RECENT_STEPS:]
            self._stepped_at = self._clock.now() - max(
                self._today().timestamp() - self._steps[-1].finished_unix_seconds, 0.0
            )

    @property
    def is_trained(self) -> bool:
        return bool(self._steps) and self._steps[-1].step >= self._total_steps

    def kept(self, checkpoint_step: int) -> None:
        self._checkpoint_step = checkpoint_step

    def could_not_be_handled(self, letter: str) -> None:
        if letter not in self._letters and len(self._letters) < MOST_LETTERS:
            self._letters.append(letter)

    # --- results -------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        now = self._clock.now()
        self._forget_the_gone()
        told = self.troubles()[:_MOST_TROUBLES]
        for each in told:
            if each.message not in self._logged:
                log.warning("%s: %s", each.trouble.reason, each.message)
        self._logged = frozenset(each.message for each in told)
        last = self._steps[-1] if self._steps else None
        step = last.step if last else 0
        seconds = [metrics.seconds.step for metrics in self._steps]
        return Report(
            run=self._run,
            step=step,
            total_steps=self._total_steps,
            checkpoint_step=self._checkpoint_step,
            reward=last.reward.mean if last else None,
            kl=last.kl_k3 if last else None,
            tokens_per_second=self._tokens_per_second(last),
            accepted_per_verification=last.accepted_per_verification if last else None,
            eta_seconds=eta_seconds(seconds, self._total_steps - step, now - self._stepped_at),
            generators_wanted=self._generators_wanted(),
            troubles=tuple(dict.fromkeys(each.trouble for each in told)),
        )

    def _tokens_per_second(self, last: StepMetrics | None) -> float | None:
        """Return the tokens per second of the last step, or of the running generators before the first step."""
        if last is not None:
            return last.tokens_per_second
        loads = [each.load for each in self.known.run.generators if each.load and self._is_there(each)]
        running = [load.tokens_per_second for load in loads if load.num_running]
        return sum(running) if running else None

    def troubles(self) -> list[TroubleEvidence]:
        """Return current troubles. Workers' silence counts only once the broker has answered for a while."""
        troubles = undeliverable(self._letters)
        if self._is_broker_away():
            since = self._answered_today.strftime("%H:%M:%SZ")
            return [broker_unavailable(self._broker, since), *troubles]
        troubles += failing(self._failing, self._clock.now())
        if self._heard_for() > SILENT_SECONDS:  # before, a silent worker may be well
            run, now = self.known.run, self._clock.now()
            quiet = min(run.quiet_seconds(now), self._heard_for())
            workers = process_states(run, now)
            troubles += stalled(workers, run.states, quiet_seconds=quiet, stall_seconds=self._stall_seconds)
        return troubles

    def _is_broker_away(self) -> bool:
        return self._clock.now() - self._answered_at > AWAY_SECONDS

    def _heard_for(self) -> float:
        return 0.0 if self._answers_since is None else self._clock.now() - self._answers_since

    def _is_there(self, generator: RunWorker) -> bool:
        return generator.key in self._there and not generator.is_load_silent(self._clock.now())

    def _left(self, key: WorkerKey, what: str) -> None:
        self._failing.pop(key, None)
        if key in self._there:
            self._there.discard(key)
            self.known.tell(ProcessNews(stage=key[0], worker=key[1], phase="left", what=what))

    def _forget_the_gone(self) -> None:
        """Forget workers that have long been silent while others of their stage send heartbeats."""
        if self._heard_for() <= GONE_SECONDS:
            return
        there, now = self.known.run.there, self._clock.now()
        speaking = {worker.stage for worker in there if not worker.is_silent(now)}
        for worker in there:
            if worker.stage in speaking and now - worker.spoke_at > GONE_SECONDS:
                self._left(worker.key, "it fell silent")

    def _generators_wanted(self) -> int | None:
        replicas = self._job.spec.roles.generator.replicas
        num_wanted = self.known.run.num_wanted
        if num_wanted is None or replicas is None:
            return None
        return min(max(num_wanted, replicas.min), replicas.max)


def eta_seconds(seconds: Sequence[float], steps_left: int, since_step: float) -> float | None:
    """Return the remaining seconds, from the middle half of recent step times.

    >>> eta_seconds([2.0, 2.0, 300.0, 2.0], steps_left=3, since_step=1.0)
    5.0
    >>> eta_seconds([2.0], steps_left=1, since_step=60.0), eta_seconds([], steps_left=3, since_step=0.0)
    (0.0, None)
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    mean = sum(middle) / len(middle)
    return max(0.0, max(steps_left, 0) * mean - min(since_step, mean))


def lines_of(steps: Sequence[StepMetrics]) -> list[str]:
    return [json.dumps(json.loads(metrics.to_line())) for metrics in steps]
