"""Lines of `samples.jsonl` and of evaluations, independent of time and drafting."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlhfspec.errors import RolloutError
from rlhfspec.messages.records import Sample, Score
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import Lengths, Spread
from rlhfspec.training.data.columns import json_text


def sample_lines(samples: Sequence[Sample], rewards: Mapping[str, Score]) -> str:
    """Return the lines of a step in id order, with `rewards` by sample id."""
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


_MOST_VALUES = 32  # of a column: those of most samples


def by_column(column: str | None, samples: Sequence[Sample], rewards: Mapping[str, Score]) -> dict[str, Any]:
    """Return two metrics fields, mean reward and number of samples, each by value of a data column."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples if column is not None else ():
        value = json.loads(sample.columns_json).get(column)
        found[value if isinstance(value, str) else json.dumps(value)].append(rewards[sample.id].values[0])
    kept = sorted(sorted(found, key=lambda value: (-len(found[value]), value))[:_MOST_VALUES])
    return {
        "reward_by_column": {value: fmean(found[value]) for value in kept},
        "num_by_column": {value: float(len(found[value])) for value in kept},
    }


def effective_number(answers: Iterable[str]) -> float:
    """Return the exponential of the entropy of the stripped answers: n for n equally frequent answers.

    >>> effective_number(["yes", "no"]), round(effective_number(["1"] * 9 + [" 1 ", "2"]), 2)
    (2.0, 1.36)
    """
    counts = Counter(answer.strip() for answer in answers)
    shares = [count / counts.total() for count in counts.values()]
    return math.exp(-math.fsum(share * math.log(share) for share in shares))


def evaluation_of(
    step: int, version: int, samples: Sequence[Sample], rewards: Mapping[str, Score], *, max_tokens: int,
    seconds: float, column: str | None = None,
) -> Evaluation:  # fmt: skip
    """Return the statistics of an evaluation's scored samples; raise RolloutError if none was scored."""
    scored = [
        (sample, rewards[sample.id])
        for sample in samples
        if not sample.error and sample.id in rewards and not rewards[sample.id].error
    ]
    if not scored:
        raise RolloutError(samples[0].id, f"has no reward, nor has any sample of the evaluation after step {step}")
    components = [dict(score.components) for _, score in scored]
    expected = [str(row["answer"]) for sample, _ in scored if "answer" in (row := json.loads(sample.columns_json))]
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
        different_answers=effective_number(sample.text for sample, _ in scored),
        expected_answers=effective_number(expected) if expected else None,
        **by_column(column, [sample for sample, _ in scored], rewards),
    )
