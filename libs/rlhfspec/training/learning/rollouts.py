"""A step's samples and scores as flat tensors, sorted by id for determinism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhfspec.errors import RolloutError
from rlhfspec.messages.records import Sample, Score, ScoringStage

ScoreTable = dict[tuple[str, ScoringStage], Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """n samples in id order with T response tokens in sample order."""

    ids: tuple[str, ...]
    group_index: Tensor  # [n] int64, the sample's prompt: 0, 1, ... in id order
    lengths: Tensor  # [n] int64, response tokens, each >= 1
    prompt_token_ids: tuple[tuple[int, ...], ...]
    token_ids: Tensor  # [T] int64
    generator_log_probs: Tensor  # [T] float32, under the distribution sampled from
    log_probs: Tensor  # [T] float32, the generator's too, at temperature 1 and without masks
    weights_versions: Tensor  # [T] int64
    rewards: Tensor  # [n] float64
    reward_components: dict[str, Tensor]  # name -> [n] float64
    reference_log_probs: Tensor | None  # [T] float32, at the temperature of sampling
    values: Tensor | None  # [T] float32, of the state before each token
    truncated: Tensor  # [n] bool: ended by maxTokens

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def of(samples: Sequence[Sample], scores: Sequence[Score]) -> Rollouts:
        """Join samples with their scores. Raise RolloutError for missing or invalid ones."""
        ordered = sorted(samples, key=lambda sample: sample.sort_key)
        for sample in ordered:
            _check_sample(sample)
        _refuse_repeats(sample.id for sample in ordered)
        table = _table(scores, {sample.id for sample in ordered})
        rewards = [_score_of(table, sample, "reward", 1) for sample in ordered]
        return Rollouts(
            ids=tuple(sample.id for sample in ordered),
            group_index=_group_index(ordered),
            lengths=torch.tensor([len(sample.token_ids) for sample in ordered], dtype=torch.int64),
            prompt_token_ids=tuple(sample.prompt_token_ids for sample in ordered),
            token_ids=_flat((sample.token_ids for sample in ordered), torch.int64),
            generator_log_probs=_flat((sample.tempered_log_probs for sample in ordered), torch.float32),
            log_probs=_flat((sample.log_probs for sample in ordered), torch.float32),
            weights_versions=_flat((sample.weights_versions for sample in ordered), torch.int64),
            rewards=torch.tensor([score.values[0] for score in rewards], dtype=torch.float64),
            reward_components=_components(rewards),
            reference_log_probs=_token_scores(ordered, table, "reference"),
            values=_token_scores(ordered, table, "critic"),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in ordered]),
        )


def _check_sample(sample: Sample) -> None:
    if sample.finish_reason == "error":
        raise RolloutError(sample.id, f"was not generated ({sample.error})")
    if not sample.token_ids:
        raise RolloutError(sample.id, "has no response tokens")
    for field in ("log_probs", "tempered_log_probs", "weights_versions"):
        numbers = getattr(sample, field)
        if len(numbers) != len(sample.token_ids):
            raise RolloutError(sample.id, f"has {len(numbers)} {field} for {len(sample.token_ids)} tokens")
        if not all(math.isfinite(number) for number in numbers):
            raise RolloutError(sample.id, f"has {field} that are not finite")


def _refuse_repeats(ids: Iterable[str]) -> None:
    seen = set()
    for sample_id in ids:
        if sample_id in seen:
            raise RolloutError(sample_id, "is there twice")
        seen.add(sample_id)


def _table(scores: Sequence[Score], ids: set[str]) -> ScoreTable:
    table: ScoreTable = {}
    for score in scores:
        if score.sample_id not in ids:
            raise RolloutError(score.sample_id, f"has a {score.stage} score but is not in the step")
        if (score.sample_id, score.stage) in table:
            raise RolloutError(score.sample_id, f"has two {score.stage} scores")
        if score.error:
            raise RolloutError(score.sample_id, f"could not be scored by {score.stage} ({score.error})")
        if not all(math.isfinite(value) for value in score.values):
            raise RolloutError(score.sample_id, f"has a {score.stage} score that is not finite")
        table[score.sample_id, score.stage] = score
    return table


def _score_of(table: ScoreTable, sample: Sample, stage: ScoringStage, num_values: int) -> Score:
    score = table.get((sample.id, stage))
    if score is None:
        raise RolloutError(sample.id, f"has no {stage} score")
    if len(score.values) != num_values:
        raise RolloutError(sample.id, f"has a {stage} score of {len(score.values)} values, not {num_values}")
    return score


def _components(rewards: Sequence[Score]) -> dict[str, Tensor]:
    names = [name for name, _ in rewards[0].components] if rewards else []
    for score in rewards:
        if [name for name, _ in score.components] != names:
            theirs = [name for name, _ in score.components]
            raise RolloutError(score.sample_id, f"has reward components {theirs}, others have {names}")
    return {
        name: torch.tensor([score.components[place][1] for score in rewards], dtype=torch.float64)
        for place, name in enumerate(names)
    }


def _token_scores(ordered: Sequence[Sample], table: ScoreTable, stage: ScoringStage) -> Tensor | None:
    if not any(scored == stage for _, scored in table):
        return None
    scores = [_score_of(table, sample, stage, len(sample.token_ids)) for sample in ordered]
    return _flat((score.values for score in scores), torch.float32)


def _group_index(ordered: Sequence[Sample]) -> Tensor:
    places = {group: place for place, group in enumerate(dict.fromkeys(sample.group_id for sample in ordered))}
    return torch.tensor([places[sample.group_id] for sample in ordered], dtype=torch.int64)


def _flat(parts: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(parts)), dtype=dtype)
