"""Control's reactions to records, without a server, on a fake clock."""

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dashboards import beat, load, snapshot
from run_folders import example_job

from rlhfspec.cluster.report import Report
from rlhfspec.control.knowledge import AWAY_SECONDS, MOST_LETTERS, RunKnowledge, eta_seconds
from rlhfspec.control.reporting import LONGEST_REPORT_WAIT_SECONDS, Turn, news
from rlhfspec.control.show import trace_lines
from rlhfspec.control.troubles import LASTING_SECONDS
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Heartbeat, Plan, StepReport
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.runs.live.run_state import GONE_SECONDS, SILENT_SECONDS
from rlhfspec.telemetry.spans import Span

NOON = datetime(2026, 7, 1, 12, 0, 7, tzinfo=UTC)
BEAT = replace(beat(), doing="waiting", what="finished samples", since_seconds=0.0, overdue_seconds=float("-inf"))
INFO = snapshot()[0]


class Run:
    def __init__(self, job: RLHFJob | None = None, **settings: Any) -> None:
        self.clock = FakeClock()
        job, broker = job or example_job(steps=9), "tls://rl-nats:4222"
        self.knowledge = RunKnowledge(job, "c0e43711", broker, self.clock, today=lambda: NOON, **settings)
        self.beats: dict[tuple[str, int], Heartbeat] = {}
        self.broker_answers = True

    def beat(self, stage: str, worker: int = 0, **changed: Any) -> None:
        self.beats[stage, worker] = replace(BEAT, stage=stage, worker=worker, **changed)

    def ready(self, stage: str, worker: int = 0) -> None:
        self.beat(stage, worker)
        self.knowledge.ready(replace(INFO, stage=stage, worker=worker))

    async def go_on(self, seconds: float) -> Report:
        for _ in range(round(seconds * 4)):
            await self.clock.advance(0.25)
            if self.broker_answers:
                self.knowledge.broker_answered()
                for beat in self.beats.values():
                    self.knowledge.heard(beat)
        return self.knowledge.report()

    def says(self, seconds: float) -> Report:
        return asyncio.run(self.go_on(seconds))

    def there(self) -> list[tuple[str, int]]:
        return [worker.key for worker in self.knowledge.known.run.there]

    def troubles(self, seconds: float) -> list[tuple[str, str]]:
        self.says(seconds)
        return [(told.trouble.reason, told.message) for told in self.knowledge.troubles()]


def test_a_healthy_run_reports_no_trouble() -> None:
    run = Run()
    for stage in ("prompts", "generator", "reward", "trainer"):
        run.ready(stage)
    assert run.troubles(100.0) == []
    assert len(run.there()) == 4


def test_an_unreachable_broker_is_reported_alone() -> None:
    run = Run()
    run.ready("reward")
    run.says(GONE_SECONDS)
    run.broker_answers = False
    assert run.troubles(AWAY_SECONDS) == []
    told = [("BrokerUnavailable", "tls://rl-nats:4222 has not answered since 12:00:07Z")]
    assert run.troubles(0.5) == told
    assert run.troubles(10 * GONE_SECONDS) == told, "the same words, though everybody is silent"
    run.broker_answers = True
    for _ in range(200):
        assert run.troubles(0.25) == []
    assert run.there() == [("reward", 0)]


def test_a_broker_unreachable_from_the_start_is_reported() -> None:
    run = Run()
    run.broker_answers = False
    assert [reason for reason, _ in run.troubles(AWAY_SECONDS + 0.5)] == ["BrokerUnavailable"]


def test_repeated_call_failures_are_reported_within_seconds() -> None:
    run = Run()
    run.ready("reward")
    run.says(1.0)
    run.beat("reward", doing="working", what="reward of sums/1/0/0", trouble="reward 'judge': it answered 503")
    assert run.troubles(LASTING_SECONDS - 0.25) == []
    told = [("RewardFailing", "reward 0: reward 'judge': it answered 503")]
    assert run.troubles(0.5) == told
    [reported] = run.says(0.0).troubles
    assert reported.model_dump() == {"reason": "RewardFailing", "workers": ("reward-0",)}, "not its words"
    run.beat("reward", trouble="reward 'judge': it answered 502")
    assert run.troubles(1.0) == told, "the same words while it lasts"
    run.ready("reward")
    assert run.troubles(0.25) == []


def test_work_past_its_deadline_is_reported_by_name() -> None:
    run = Run()
    run.ready("reward")
    run.says(SILENT_SECONDS + 1)
    run.beat("reward", doing="working", what="reward of sums/3/7/1", since_seconds=66.0, overdue_seconds=6.0)
    told = "reward 0: reward of sums/3/7/1 takes longer than its deadline of 60 s"
    assert run.troubles(0.25) == [("Stalled", told)]


def test_a_stall_names_every_waiting_worker() -> None:
    run = Run(stall_seconds=300.0)
    run.ready("trainer")
    run.ready("generator")
    assert run.troubles(299.0) == []
    [(reason, message)] = run.troubles(3.0)
    assert reason == "Stalled"
    assert message.startswith("no worker has worked for 300 s; waiting: ")
    assert "trainer 0 for finished samples, from prompts or generator" in message
    run.beat("generator", doing="working")
    assert run.troubles(0.25) == []


def test_a_dead_worker_is_reported_until_its_successor_is_ready() -> None:
    run = Run()
    run.ready("reward")
    run.says(SILENT_SECONDS + 1)
    del run.beats["reward", 0]
    assert run.troubles(SILENT_SECONDS - 1) == []
    assert run.troubles(2.0) == [("Stalled", "reward 0: no heartbeat for 15 s")]
    assert run.troubles(10 * GONE_SECONDS) != [], "it is the only one of its stage"
    run.ready("reward")
    assert run.troubles(0.25) == []


def test_a_drained_worker_is_no_trouble() -> None:
    run = Run()
    run.ready("generator", 0)
    run.ready("generator", 1)
    run.says(SILENT_SECONDS + 1)
    run.knowledge.known.tell(load(1))
    assert run.says(0.25).tokens_per_second == 1001.0
    run.beat("generator", 1, doing="stopped", what="leaves")
    assert run.says(0.25).tokens_per_second is None, "its load is no load any more"
    assert run.there() == [("generator", 0)]
    del run.beats["generator", 1]
    assert run.troubles(100.0) == []
    run.ready("generator", 1)  # and comes back
    run.says(0.25)
    assert len(run.there()) == 2


def test_one_of_several_workers_killed_for_good_is_forgotten() -> None:
    run = Run()
    run.ready("generator", 0)
    run.ready("generator", 1)
    run.says(GONE_SECONDS + 1)
    del run.beats["generator", 1]
    assert [reason for reason, _ in run.troubles(SILENT_SECONDS + 1)] == ["Stalled"]
    assert run.troubles(GONE_SECONDS) == []


def test_old_records_of_gone_workers_are_ignored() -> None:
    """A restarted control is told of every worker that ever existed."""
    run = Run()
    for worker in range(3):
        run.knowledge.ready(replace(INFO, stage="generator", worker=worker))
    run.beat("generator", 0)
    assert run.troubles(100.0) == []
    assert run.there() == [("generator", 0)]


def test_dead_letters_are_reported_up_to_a_limit() -> None:
    run = Run()
    for number in range(100):
        run.knowledge.could_not_be_handled(f"reward: could not handle sums/1/0/{number}: " + "x" * 5000)
    told = run.troubles(0.25)
    assert [reason for reason, _ in told] == ["RecordUndeliverable"] * MOST_LETTERS
    assert told[0][1].startswith("reward: could not handle sums/1/0/0")


def test_the_step_comes_from_reports_or_the_folder_and_may_go_back() -> None:
    run = Run()
    run.knowledge.found([example_step(step=step) for step in range(1, 6)])
    assert run.says(0.25).step == 5
    run.knowledge.stepped(StepReport(id="r", job="sums", metrics=example_step(step=4, reward=0.75)))
    report = run.says(1.0)
    assert (report.step, report.reward, report.kl) == (4, 0.75, 0.004)
    assert report.tokens_per_second == 1234.5
    assert report.eta_seconds == pytest.approx(5 * 3.8 - 1.0)
    run.knowledge.read(DatasetInfo(id="d", job="sums", num_prompts=9, num_held_out=0, last_step=6))
    assert run.says(0.25).total_steps == 6


def test_advice_is_kept_within_what_the_job_allows() -> None:
    job = example_job(steps=9)
    roles = job.spec.roles.model_dump(by_alias=True) | {"generator": {"replicas": {"min": 2, "max": 3}}}
    content = job.model_dump(by_alias=True)
    content["spec"]["roles"] = roles
    run = Run(RLHFJob.model_validate(content))
    assert run.says(0.25).generators_wanted is None
    for wanted, told in ((0, None), (1, 2), (3, 3), (9, 3)):
        run.knowledge.known.tell(Plan(id="p", job="sums", num_wanted=wanted, why_wanted="it pays"))
        assert run.says(0.25).generators_wanted == told
    fixed = Run()
    fixed.knowledge.known.tell(Plan(id="p", job="sums", num_wanted=3))
    assert fixed.says(0.25).generators_wanted is None, "its number is not left to us"


def test_the_time_left_is_not_that_of_one_slow_step() -> None:
    assert eta_seconds([1.0] * 12 + [500.0] * 4, steps_left=10, since_step=0.0) == 10.0


def test_heartbeats_of_the_same_work_are_no_news() -> None:
    run = Run()
    run.ready("reward")
    before = run.says(20.0)
    run.beat("reward", doing="working", what="reward of sums/1/0/0")
    assert news(run.says(5.0)) == news(before)
    run.beat("reward", doing="working", what="reward of sums/1/0/0", overdue_seconds=1.0)
    assert news(run.says(0.25)) != news(before)


def test_reports_to_an_absent_operator_back_off() -> None:
    turn, report, now, times = Turn(random.Random(1)), Report(run="c0e43711"), 0.0, []
    while now < 200.0:
        if turn.is_due(report, now):
            assert turn.was_not_taken(now) == (not times)
            times.append(now)
        now += 0.25
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert max(waits) <= LONGEST_REPORT_WAIT_SECONDS + 0.25
    assert min(waits[5:]) >= LONGEST_REPORT_WAIT_SECONDS / 2
    assert len(set(waits[5:])) > 3, "many jobs do not come back at once"


def test_a_trace_of_a_sample_becomes_log_lines(tmp_path: Path) -> None:
    span = Span(run="3f2a", sample="sums/3/7/1", name="reward", stage="reward", worker=0, step=3, began=5.0, ended=5.5)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "reward-0.jsonl").write_text(span.to_line() + "\n")
    assert trace_lines(tmp_path, "sums/3/7/1") == [
        {"time": "1970-01-01T00:00:05.500000Z", "worker": "reward-0", "level": "trace", "message": "reward, 500 ms",
         "sample": "sums/3/7/1"}
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="SAMPLE"):
        trace_lines(tmp_path, "sums/9/9/9")
