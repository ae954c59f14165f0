"""A sample and its reward as a line of `samples.jsonl`. It holds nothing that depends on time or on drafting.

Example:
    >>> import json
    >>> sample = example_sample(step=3, text="4", log_probs=(-0.5, -0.25))
    >>> score = Score(id=sample.id + "/reward", sample_id=sample.id, job="sums", step=3, stage="reward", values=(1.0,))
    >>> json.loads(sample_line(sample, score))["log_probs"]
    {'sum': -0.75, 'mean': -0.375, 'min': -0.5}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhfspec.messages.records import Sample, Score, sample_id
from rlhfspec.training.data.columns import json_text


def sample_lines(samples: Sequence[Sample], rewards: Mapping[str, Score]) -> str:
    """Return the lines of a step in id order; `rewards` by sample id, and a sample without one has reward null."""
    ordered = sorted(samples, key=lambda sample: sample.sort_key)
    return "".join(sample_line(sample, rewards.get(sample.id)) for sample in ordered)


def sample_line(sample: Sample, reward: Score | None) -> str:
    scored = reward is not None and not reward.error
    line = json_text(
        {
            "id": sample.id,
            "step": sample.step,
            "prompt": sample.prompt_text,
            "text": sample.text,
            "tokens": list(sample.token_ids),
            "reward": reward.values[0] if reward is not None and scored else None,
            "components": dict(reward.components) if reward is not None and scored else {},
            "log_probs": _summary(sample.log_probs),
            "weights_version": max(sample.weights_versions, default=None),
            "finish_reason": sample.finish_reason,
            "error": sample.error or (reward.error if reward is not None else ""),
        }
    )
    return line + "\n"


def _summary(log_probs: Sequence[float]) -> dict[str, float] | None:
    if not log_probs:
        return None
    total = math.fsum(log_probs)
    return {"sum": total, "mean": total / len(log_probs), "min": min(log_probs)}


def example_sample(
    *, step: int = 1, prompt: int = 0, replica: int = 0, text: str = "4", log_probs: Sequence[float] = (-0.5,)
) -> Sample:
    """Return a sample for examples and tests."""
    return Sample(
        id=sample_id("sums", step=step, prompt=prompt, replica=replica),
        job="sums",
        step=step,
        prompt=prompt,
        replica=replica,
        prompt_text="2+2=",
        prompt_token_ids=(50, 43, 50, 61),
        columns_json="{}",
        text=text,
        token_ids=tuple(range(50, 50 + len(log_probs))),
        log_probs=tuple(log_probs),
        tempered_log_probs=tuple(log_probs),
        weights_versions=(step - 1,) * len(log_probs),
        finish_reason="stop",
        num_verifications=1,
        num_accepted=1,
    )
