"""An engine's log-probs are compared with the trainer's after every weight swap."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_job import a_job
from stages import FakeLearner, FakeSources, Stages

from rlhfspec.errors import LogProbMismatch
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.trainer.agreement import Agreement, precision_of
from rlhfspec.trainer.collector import example_sample, example_score
from rlhfspec.training.learning.learner import LearnReport
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.worker.exits import PERMANENT, code_of

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
    return LearnReport(version=step, metrics={}, advantages=zeros, log_probs=zeros, untempered_log_probs=untempered)


@pytest.mark.parametrize(("precision", "allowed", "spec"), CASES)
def test_what_rounds_most_decides_how_much_is_allowed(precision: str, allowed: float, spec: dict[str, Any]) -> None:
    job, rollouts = a_job(**spec), rollouts_of(2, (1, 1))
    assert precision_of(job.spec) == precision
    agreement = Agreement(job.spec)
    agreement.check(2, rollouts, report_of(2, rollouts, 0.9 * allowed, -0.9 * allowed))
    with pytest.raises(LogProbMismatch) as caught:
        agreement.check(2, rollouts, report_of(2, rollouts, 1.1 * allowed + 1e-6, -1.1 * allowed - 1e-6))
    assert (caught.value.engine, caught.value.step) == (job.spec.generation.engine.name, 2)
    assert caught.value.allowed == allowed
    assert code_of(caught.value) == PERMANENT


def test_a_restarted_trainer_of_an_exact_job_lets_its_generators_round() -> None:
    """Steps after the checkpoint are retrained, on another machine to other bits."""
    rollouts, agreement = rollouts_of(2, (1, 1)), Agreement(a_job(training={"exactOnPolicy": True}).spec)
    with pytest.raises(LogProbMismatch, match="exact"):
        agreement.check(2, rollouts, report_of(2, rollouts, 1e-6, 0.0))
    agreement.allow_for_a_restart()
    agreement.check(2, rollouts, report_of(2, rollouts, 1e-6, 0.0))


@pytest.mark.parametrize(("versions", "is_seen"), [((1, 1), True), ((0, 1), True), ((1, 0), False), ((0, 0), False)])
def test_tokens_of_older_weights_are_not_compared(versions: tuple[int, int], is_seen: bool) -> None:
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
        report = super().learn(rollouts)
        return replace(report, untempered_log_probs=rollouts.log_probs + 0.07 * (self.version > 1))


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
        await service.stop()
        await task
        service.close()
    assert [trained.step for trained in stages.recorder.trained] == [1]
    assert stages.engines[0].weights_version == 1
    await stages.transport.close()
