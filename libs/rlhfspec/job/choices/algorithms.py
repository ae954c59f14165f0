"""Algorithms for `algorithm.name` (docs/algorithms.md). `make` names a function from token rewards to advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhfspec.job.choices.registry import Entry, Registry

_ESTIMATORS_MODULE = "rlhfspec.training.learning.estimators"


@dataclass(frozen=True, kw_only=True)
class AlgorithmEntry(Entry):
    paper: str = ""  # number at arxiv.org
    compares_responses: bool = False  # needs at least two responses to each prompt
    has_critic: bool = False  # the advantage uses the values of a critic, which is trained too
    # Values that the paper prescribes where they differ from the defaults of the job's fields (GRPO's).
    defaults: Mapping[str, Any] = field(default_factory=dict)


ALGORITHMS = Registry(
    "algorithm.name",
    AlgorithmEntry(
        name="ppo",
        about="GAE against a critic, whitened",
        make=f"{_ESTIMATORS_MODULE}:against_values",
        paper="1707.06347",
        has_critic=True,
        defaults={
            "samples_per_prompt": 1, "whiten_advantages": True, "kl_coefficient": 0.05, "kl_placement": "reward",
            "kl_estimator": "k1", "loss_aggregation": "token-mean",
        },
    ),
    AlgorithmEntry(
        name="grpo",
        about="(r - mean) / std of the prompt's group",
        make=f"{_ESTIMATORS_MODULE}:against_group",
        paper="2402.03300",
        compares_responses=True,
        defaults={"kl_coefficient": 0.04},
    ),
    AlgorithmEntry(
        name="dr-grpo",
        about="r - mean of the prompt's group",
        make=f"{_ESTIMATORS_MODULE}:against_group",
        paper="2503.20783",
        compares_responses=True,
        defaults={"normalize_by_std": False, "loss_aggregation": "sequence-sum-constant"},
    ),
    AlgorithmEntry(
        name="rloo",
        about="r - mean of the group's other samples",
        make=f"{_ESTIMATORS_MODULE}:against_others",
        paper="2402.14740",
        compares_responses=True,
        defaults={
            "normalize_by_std": False, "kl_coefficient": 0.05, "kl_placement": "reward", "kl_estimator": "k1",
            "loss_aggregation": "sequence-sum-constant",
        },
    ),
    AlgorithmEntry(
        name="reinforce++",
        about="reward to go, whitened over the whole step",
        make=f"{_ESTIMATORS_MODULE}:reward_to_go",
        paper="2501.03262",
        defaults={
            "samples_per_prompt": 1, "whiten_advantages": True, "kl_coefficient": 0.01, "kl_placement": "reward",
            "kl_estimator": "k1", "loss_aggregation": "token-mean",
        },
    ),
    AlgorithmEntry(
        name="dapo",
        about="(r - mean) / std of the prompt's group",
        make=f"{_ESTIMATORS_MODULE}:against_group",
        paper="2503.14476",
        compares_responses=True,
        defaults={"clip_high": 0.28, "loss_aggregation": "token-mean", "dynamic_sampling": True},
    ),
    AlgorithmEntry(
        name="gspo",
        about="(r - mean) / std of the prompt's group",
        make=f"{_ESTIMATORS_MODULE}:against_group",
        paper="2507.18071",
        compares_responses=True,
        defaults={"clip_low": 3e-4, "clip_high": 4e-4, "ratio_level": "sequence"},
    ),
)  # fmt: skip
