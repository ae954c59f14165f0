"""What the policy said at first and what it says now: the same prompts, the same noise, other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rlhfspec.engine.core import Engine
from rlhfspec.errors import RLHFSpecError
from rlhfspec.generator.service import sample_of, sampling_params
from rlhfspec.prompts.service import prompts_of
from rlhfspec.records import Prompt, Sample, Score
from rlhfspec.scoring.rewards.sources import RewardSources
from rlhfspec.telemetry.run_folder import RunFolder
from rlhfspec.telemetry.summary import ResponseText

if TYPE_CHECKING:
    from rlhfspec.cli.local import Parts


def before_and_after(parts: Parts, folder: RunFolder) -> tuple[list[ResponseText], list[ResponseText]]:
    """The first replica of step 1's first prompts: as sampled then, and by the policy as it is now."""
    job = parts.job
    wanted = min(job.spec.observability.sample_texts, job.spec.training.prompts_per_step)
    prompts = prompts_of(job, parts.prompts, 1, 0, wanted)
    lines = takewhile(lambda line: line["step"] == 1, folder.samples())
    before: dict[str, dict[str, Any]] = {line["id"]: line for line in lines}
    samples = _generate(parts, prompts)
    rewards = {score.sample_id: score for score in _rewards(parts.sources, samples)}
    shown = [sample for sample in samples if sample.replica == 0 and sample.id in before]
    return (
        [_response(s.prompt_text, before[s.id]["text"], before[s.id]["reward"]) for s in shown],
        [_response(s.prompt_text, s.text, _value(rewards.get(s.id))) for s in shown],
    )


def _generate(parts: Parts, prompts: Sequence[Prompt]) -> list[Sample]:
    engine: Engine = parts.engines[0]
    version = max(parts.learner.version, engine.weights_version + 1)
    engine.load_weights(parts.learner.policy_state(), version=version)
    completions = engine.generate(
        [prompt.token_ids for prompt in prompts],
        sampling_params(parts.job.spec.generation),
        [prompt.seed for prompt in prompts],
    )
    return [sample_of(prompt, done, "") for prompt, done in zip(prompts, completions, strict=True)]


def _rewards(sources: RewardSources, samples: Sequence[Sample]) -> list[Score]:
    """None when a source fails now: the run is over, and this is for the eyes only."""
    try:
        return asyncio.run(_score_groups(sources, samples))
    except RLHFSpecError:
        return []


async def _score_groups(sources: RewardSources, samples: Sequence[Sample]) -> list[Score]:
    groups = [[s for s in samples if s.group_id == name] for name in dict.fromkeys(s.group_id for s in samples)]
    await sources.start()
    try:
        return [score for group in groups for score in await sources.score_many(group)]
    finally:
        await sources.close()


def _response(prompt: str, text: str, reward: float | None) -> ResponseText:
    return ResponseText(prompt=prompt, text=text, reward=reward)


def _value(score: Score | None) -> float | None:
    return score.values[0] if score is not None and not score.error else None
