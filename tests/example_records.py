"""Records with values that tests need no say in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhfspec.messages.records import Sample, Score, sample_id
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import Lengths, Spread


def example_sample(
    prompt: int = 0, replica: int = 0, *, step: int = 1, job: str = "sums", log_probs: Sequence[float] = (-0.5, -0.1),
    **fields: Any,
) -> Sample:  # fmt: skip
    sample = Sample(
        id=sample_id(job, step=step, prompt=prompt, replica=replica),
        job=job,
        step=step,
        prompt=prompt,
        replica=replica,
        prompt_text="2+2=",
        prompt_token_ids=(50, 43, 50, 61),
        columns_json="{}",
        text="4",
        token_ids=tuple(range(50, 50 + len(log_probs))),
        log_probs=tuple(log_probs),
        tempered_log_probs=tuple(log_probs),
        weights_versions=(step - 1,) * len(log_probs),
        finish_reason="stop",
    )
    return replace(sample, **fields)


def example_score(prompt: int, replica: int, reward: float, *, step: int = 1, error: str = "") -> Score:
    of = sample_id("sums", step=step, prompt=prompt, replica=replica)
    values = () if error else (reward,)
    return Score(id=f"{of}/reward", sample_id=of, job="sums", step=step, stage="reward", values=values, error=error)


def example_evaluation(*, step: int = 1, reward: float = 0.5) -> Evaluation:
    return Evaluation(
        step=step,
        weights_version=step,
        num_samples=4,
        num_failed=0,
        reward=Spread.of([reward - 0.25, reward, reward, reward + 0.25]),
        reward_components={"exact": reward},
        response_length=Lengths.of([10, 20, 20, 60], max_tokens=64),
        truncated_fraction=0.0,
        seconds=1.5,
    )
