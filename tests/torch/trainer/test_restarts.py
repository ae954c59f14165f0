"""A stage that is restarted changes no curve; an engine's log-probs are compared with the trainer's."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from example_records import example_sample, example_score
from hypothesis import HealthCheck, given, settings, strategies as st
from small_job import a_job
from stages import FakeLearner, FakeRecorder, FakeSources, Stages, ends, killed

from rlhfspec.errors import LogProbMismatch, RolloutError
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.trainer.agreement import Agreement, precision_of
from rlhfspec.trainer.collector import Collector, StepShape
from rlhfspec.training.learning.learner import LearnReport
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.worker.exits import PERMANENT, code_of

NUM_STEPS = 12


class ChainLearner(FakeLearner):
    def __init__(self) -> None:
        super().__init__()
        self.chain = 0.0

    def learn(self, rollouts: Rollouts) -> LearnReport:
        report = super().learn(rollouts)
        tokens = float(rollouts.token_ids.double() @ torch.arange(len(rollouts.token_ids)).double())
        self.chain = (1.7 * self.chain + tokens + float(rollouts.rewards.sum())) % 1e4
        return report

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "chain": self.chain}

    def load_state(self, state: dict[str, Any]) -> None:
        self.version, self.chain = state["version"], state["chain"]


class KeepingRecorder(FakeRecorder):
    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[str, Any] | None = None
        self.chains: dict[int, list[float]] = {}
        self.learner: Any = None

    def restore(self) -> dict[str, Any] | None:
        return self.saved

    def record(self, trained: Any) -> str:
        self.chains.setdefault(trained.step, []).append(self.learner.chain)
        return super().record(trained)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        self.saved = dict(state)
        self.checkpoints.append(step)


async def _trained(job: Any, deaths: list[int]) -> KeepingRecorder:
    stages = await Stages.open(job, SystemClock(), prompts=1, generator=2, reward=1, trainer=1)
    others = [stages.prompts(), stages.generator(0), stages.generator(1), stages.reward(FakeSources())]
    running = [asyncio.create_task(service.run()) for service in others]
    recorder = KeepingRecorder()
    for lines in [*deaths, 10**9]:
        recorder.learner = stages.learner = ChainLearner()
        stages.recorder = recorder
        trainer = stages.trainer()
        task, wanted = asyncio.create_task(trainer.run()), len(recorder.trained) + lines
        while not task.done() and len(recorder.trained) < wanted:
            await asyncio.sleep(0.001)
        if task.done():
            task.result()
            break
        await killed(task, trainer)
        await stages.bus.release("trainer")
    assert not any(task.done() for task in running), "nobody else was restarted"
    for service, task in zip(others, running, strict=True):
        await ends(task, service)
    trainer.close()
    assert trainer.is_done
    assert not stages.stored(), "all is acknowledged in the end"
    await stages.transport.close()
    return recorder


async def test_a_trainer_that_starts_after_the_last_step_acknowledges_what_is_left() -> None:
    """The one before it died between its last checkpoint and the acknowledgements."""
    stages = await Stages.open(a_job(training={"steps": 1}), prompts=1, generator=1, reward=1, trainer=1)
    await stages.publish("generator", example_sample(0, 0))
    await stages.publish("reward", example_score(0, 0, 1.0))
    assert not stages.has_read("trainer")
    stages.learner = FakeLearner(version=1)
    trainer = stages.trainer()
    await trainer.run()
    trainer.close()
    assert stages.has_read("trainer")


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    deaths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    every=st.integers(1, 5),
    staleness=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_a_trainer_that_dies_trains_to_the_same_bits(deaths: list[int], every: int, staleness: int, seed: int) -> None:
    training = {"steps": NUM_STEPS, "promptsPerStep": 2, "maxStaleness": staleness}
    job = a_job(training=training, checkpoint={"everySteps": every})
    recorder = asyncio.run(_trained(job, deaths))
    assert sorted(recorder.chains) == list(range(1, NUM_STEPS + 1))
    for step, chains in recorder.chains.items():
        assert len(set(chains)) == 1, f"step {step} was trained to other weights the second time"
    if not staleness:
        assert recorder.chains == {step: [chains[0]] * len(recorder.chains[step]) for step, chains in _whole().items()}


def _whole(found: dict[int, list[float]] = {}) -> dict[int, list[float]]:  # noqa: B006 (computed once)
    if not found:
        found.update(asyncio.run(_trained(a_job(training={"steps": NUM_STEPS, "promptsPerStep": 2}), [])).chains)
    return found


def test_a_step_with_demands_is_repeated_whatever_samples_exist_already() -> None:
    shape = StepShape(job="sums", step=1, num_prompts=2, samples_per_prompt=1, stages=(), max_demands=2)
    collector = Collector(shape)
    for place in (1, 2, 3, 4):  # 2 and 3 are the first demand's, 4 and 5 the second's
        collector.add_sample(example_sample(place, 0))
    assert not collector.is_complete
    assert collector.waits_for() == "1 sample of step 1"
    collector.add_sample(example_sample(0, 0))
    assert collector.is_complete


def test_a_second_copy_of_a_sample_must_be_the_same() -> None:
    collector = Collector(StepShape(job="sums", step=1, num_prompts=1, samples_per_prompt=2, stages=()))
    first = example_sample(0, 0)
    collector.add_sample(first)
    collector.add_sample(replace(first, generator="generator-1", seconds=3.0))
    with pytest.raises(RolloutError, match="sums/1/0/0: arrived twice with different tokens from the same weights"):
        collector.add_sample(replace(first, token_ids=(52, 2)))
    collector.add_sample(example_sample(0, 1))
    assert collector.chosen().samples[0] is first, "the first that arrived counts"


CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("float32", 1e-3, {"generation": {"dtype": "float32"}, "model": {"dtype": "float32"}}),
    ("exact", 0.0, {"training": {"exactOnPolicy": True}, "generation": {"dtype": "bfloat16"}}),
    ("bfloat16", 0.1, {"generation": {"dtype": "bfloat16"}}),
    ("bfloat16", 0.1, {"model": {"dtype": "bfloat16"}}),
    ("bfloat16", 0.1, {"training": {"autocast": "bfloat16"}}),
    ("quantised", 1.0, {"generation": {"engine": {"name": "vllm", "arguments": {"quantization": "fp8"}}}}),
    ("quantised", 1.0, {"generation": {"engine": {"name": "vllm", "arguments": {"kv_cache_dtype": "fp8"}}}}),
]


def rollouts_of(step: int, versions: tuple[int, int]) -> Rollouts:
    sample = replace(example_sample(0, 0, step=step), weights_versions=versions)
    return Rollouts.of([sample], [example_score(0, 0, 1.0, step=step)])


def report_of(step: int, rollouts: Rollouts, *differences: float) -> LearnReport:
    zeros = torch.zeros(2)
    untempered = rollouts.log_probs + torch.tensor(differences)
    has_run = torch.ones_like(untempered, dtype=torch.bool)
    nothing: Any = {"version": step, "metrics": {}, "advantages": zeros, "log_probs": zeros}
    return LearnReport(untempered_log_probs=untempered, has_run=has_run, **nothing)


@pytest.mark.parametrize(("precision", "allowed", "spec"), CASES)
def test_the_least_precise_part_decides_the_tolerance(precision: str, allowed: float, spec: dict[str, Any]) -> None:
    job, rollouts = a_job(**spec), rollouts_of(2, (1, 1))
    assert precision_of(job.spec) == precision
    agreement = Agreement(job.spec)
    agreement.check(2, rollouts, report_of(2, rollouts, 0.9 * allowed, -0.9 * allowed))
    with pytest.raises(LogProbMismatch) as caught:
        agreement.check(2, rollouts, report_of(2, rollouts, 1.1 * allowed + 1e-6, -1.1 * allowed - 1e-6))
    assert (caught.value.engine, caught.value.step) == (job.spec.generation.engine.name, 2)
    assert caught.value.allowed == allowed
    assert code_of(caught.value) == PERMANENT


def test_a_restarted_exact_job_tolerates_rounding_differences() -> None:
    """Steps after the checkpoint are retrained, on another machine to other bits."""
    rollouts, agreement = rollouts_of(2, (1, 1)), Agreement(a_job(training={"exactOnPolicy": True}).spec)
    with pytest.raises(LogProbMismatch, match="exact"):
        agreement.check(2, rollouts, report_of(2, rollouts, 1e-6, 0.0))
    agreement.allow_for_a_restart()
    agreement.check(2, rollouts, report_of(2, rollouts, 1e-6, 0.0))


@pytest.mark.parametrize(("versions", "is_seen"), [((1, 1), True), ((0, 1), True), ((1, 0), False), ((0, 0), False)])
def test_log_probs_of_older_weights_are_not_compared(versions: tuple[int, int], is_seen: bool) -> None:
    """The second token differs; it counts only as one of version 1, which the trainer has in step 2."""
    rollouts = rollouts_of(2, versions)
    agreement, report = Agreement(a_job().spec), report_of(2, rollouts, 0.0, 5e-3)
    if is_seen:
        with pytest.raises(LogProbMismatch):
            agreement.check(2, rollouts, report)
    else:
        agreement.check(2, rollouts, report)


class FarLearner(FakeLearner):
    """Learner whose log-probs leave the generator's from the second step on, as with a stale head."""

    def learn(self, rollouts: Rollouts) -> LearnReport:
        return replace(super().learn(rollouts), untempered_log_probs=rollouts.log_probs + 0.07 * (self.version > 1))


async def test_nothing_of_a_step_that_differs_leaves_the_trainer() -> None:
    stages = await Stages.open(a_job(), SystemClock(), prompts=1, generator=1, reward=1, trainer=1)
    stages.learner = FarLearner()
    others = [stages.prompts(), stages.generator(), stages.reward(FakeSources())]
    running = [asyncio.create_task(service.run()) for service in others]
    trainer = stages.trainer()
    with pytest.raises(LogProbMismatch, match="own: step 2:"):
        await asyncio.wait_for(trainer.run(), 60.0)
    trainer.close()
    for service, task in zip(others, running, strict=True):
        await ends(task, service)
    assert [trained.step for trained in stages.recorder.trained] == [1]
    assert stages.engines[0].weights_version == 1
    await stages.transport.close()
