"""From the scored samples of an evaluation to its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhfspec.errors import RolloutError
from rlhfspec.messages.records import Sample, Score
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import Lengths, Spread


def evaluation_of(
    step: int, version: int, samples: Sequence[Sample], rewards: Mapping[str, Score], *, max_tokens: int, seconds: float
) -> Evaluation:
    """Return the line. `rewards` by sample id. RolloutError when not one sample was scored."""
    scored = [
        (sample, rewards[sample.id])
        for sample in samples
        if not sample.error and sample.id in rewards and not rewards[sample.id].error
    ]
    if not scored:
        raise RolloutError(samples[0].id, f"and every other of the evaluation after step {step} has no reward")
    components = [dict(score.components) for _, score in scored]
    return Evaluation(
        step=step,
        weights_version=version,
        num_samples=len(scored),
        num_failed=len(samples) - len(scored),
        reward=Spread.of([score.values[0] for _, score in scored]),
        reward_components={name: fmean(of[name] for of in components) for name in components[0]},
        response_length=Lengths.of([len(sample.token_ids) for sample, _ in scored], max_tokens=max_tokens),
        truncated_fraction=fmean(sample.finish_reason == "length" for sample, _ in scored),
        seconds=seconds,
    )
