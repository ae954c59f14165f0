"""Reward sources of a job behind one call."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from rlhfspec.errors import RewardError
from rlhfspec.job.file.secrets import request_of
from rlhfspec.job.rewards import FunctionSource, HttpSource, ModelSource, Rewards
from rlhfspec.messages.records import Sample, Score
from rlhfspec.training.scoring.rewards.attempts import Attempts, During, Limits, Sleep, Told
from rlhfspec.training.scoring.rewards.base import CallFailed, Reward, Rewarder, combine
from rlhfspec.training.scoring.rewards.function import FunctionRewards
from rlhfspec.training.scoring.rewards.imports import load_function
from rlhfspec.training.scoring.rewards.model import ModelRewards

log = logging.getLogger(__name__)
ON_DEVICE_CONCURRENCY = 64
AnySource = FunctionSource | ModelSource | HttpSource


class RewardSources:
    """Scorer that calls all reward sources of a job concurrently. Workers of one event loop may share it.

    A failing source raises RewardError or gives a score with `error`, per its `onError`, and never counts as zero.
    keep_prompts: run each prompt once for its responses.
    """

    def __init__(
        self,
        rewards: Rewards,
        base_folder: Path,
        *,
        device: str = "cpu",
        keep_prompts: bool = True,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        made = [
            _make(source, base_folder, f"spec.rewards.sources[{index}]", device, keep_prompts)
            for index, source in enumerate(rewards.sources)
        ]
        self.names = _names(rewards.sources)
        self._how = rewards.combine
        self._told_step = 0  # the last step with a logged dropped sample
        self._failing: dict[str, str] = {}  # by source: error of its last call
        self._weights = [source.weight for source in rewards.sources]
        self._drops = [source.on_error == "drop" for source in rewards.sources]
        limits = [_limits(source, device) for source in rewards.sources]
        self.concurrency = max(each.concurrency for each in limits)
        self._attempts = [
            Attempts(name, source, limit, sleep) for name, source, limit in zip(self.names, made, limits, strict=True)
        ]

    @property
    def grouping(self) -> Literal["sample", "group"]:
        """Return "group" if a source needs all samples of a prompt in one `score_many` call."""
        return "group" if any(attempts.source.grouped for attempts in self._attempts) else "sample"

    def check_columns(self, columns: Mapping[str, str]) -> None:
        for attempts in self._attempts:
            if isinstance(attempts.source, FunctionRewards):
                attempts.source.check_columns(columns)

    async def start(self) -> None:
        await asyncio.gather(*(attempts.source.start() for attempts in self._attempts))

    async def close(self) -> None:
        await asyncio.gather(*(attempts.source.close() for attempts in self._attempts))

    async def score_many(
        self,
        samples: Sequence[Sample],
        during: During = lambda what: nullcontext(),
        in_trouble: Callable[[str], None] = lambda what: None,
    ) -> list[Score]:
        """Return scores, in id order, of a prompt's samples, or of any samples if `grouping` is "sample".

        Failed generations get a score with their error. `during`: context of each source call.
        `in_trouble`: callback with the failing sources when they change.
        """
        ordered = sorted(samples, key=lambda sample: sample.sort_key)
        assert self.grouping == "sample" or len({sample.group_id for sample in ordered}) <= 1, "one group at a time"
        usable = [sample for sample in ordered if sample.finish_reason != "error"]
        if not usable:
            return [_not_generated(sample) for sample in ordered]

        def told(name: str, problem: str) -> None:
            if self._has_changed(name, problem):
                in_trouble("; ".join(f"reward {name!r}: {problem}" for name, problem in self._failing.items()))

        by_source = await asyncio.gather(*(_from(attempts, usable, during, told) for attempts in self._attempts))
        scores = {
            sample.id: self._combined(sample, results)
            for sample, results in zip(usable, zip(*by_source, strict=True), strict=True)
        }
        return [scores[sample.id] if sample.id in scores else _not_generated(sample) for sample in ordered]

    def _combined(self, sample: Sample, results: Sequence[Reward]) -> Score:
        failures = [(name, r) for name, r in zip(self.names, results, strict=True) if isinstance(r, CallFailed)]
        for (name, result), drop in zip(zip(self.names, results, strict=True), self._drops, strict=True):
            if isinstance(result, CallFailed) and not drop:
                raise RewardError(name, sample.id, result.problem) from (result.__cause__ or result)
        components = [(n, r) for n, r in zip(self.names, results, strict=True) if not isinstance(r, CallFailed)]
        if failures:
            error = "; ".join(f"reward {name!r}: {failure.problem}" for name, failure in failures)
            self._tell(sample, error)
            return _score(sample, components=tuple(components), error=error)
        total = combine(self._how, self._weights, [value for _, value in components])
        if not math.isfinite(total):
            raise RewardError(", ".join(self.names), sample.id, f"their {self._how} is {total}: {dict(components)}")
        return _score(sample, values=(total,), components=tuple(components))

    def _has_changed(self, name: str, problem: str) -> bool:
        before = self._failing.get(name, "")
        if problem:
            self._failing[name] = problem
        else:
            self._failing.pop(name, None)
        return problem != before

    def _tell(self, sample: Sample, error: str) -> None:
        """Log only a step's first dropped sample, because a source that is down drops all samples."""
        if sample.step != self._told_step:
            self._told_step = sample.step
            log.warning("sample %s is left out: %s (others of this step only count in num_dropped)", sample.id, error)


async def _from(attempts: Attempts, samples: Sequence[Sample], during: During, told: Told) -> list[Reward]:
    groups = [list(samples)] if attempts.source.grouped else [[sample] for sample in samples]
    results = await asyncio.gather(*(attempts.rewards(group, during, told) for group in groups))
    flat: list[Reward] = []
    for group, result in zip(groups, results, strict=True):
        flat += [result] * len(group) if isinstance(result, CallFailed) else result
    return flat


def _score(
    sample: Sample, *, values: tuple[float, ...] = (), components: tuple[tuple[str, float], ...] = (), error: str = ""
) -> Score:
    return Score(
        id=f"{sample.id}/reward",
        sample_id=sample.id,
        job=sample.job,
        step=sample.step,
        purpose=sample.purpose,
        stage="reward",
        values=values,
        components=components,
        error=error,
    )


def _not_generated(sample: Sample) -> Score:
    return _score(sample, error=f"not generated: {sample.error}")


def _limits(source: AnySource, device: str) -> Limits:
    """Return a source's limits, higher for a model on a device, which batches calls."""
    concurrency = source.concurrency
    if isinstance(source, ModelSource) and device != "cpu" and "concurrency" not in source.model_fields_set:
        concurrency = ON_DEVICE_CONCURRENCY
    return Limits(concurrency=concurrency, timeout_seconds=source.timeout_seconds, retries=source.retries)


def _make(source: AnySource, base_folder: Path, field: str, device: str, keep_prompts: bool) -> Rewarder:
    match source:
        case FunctionSource():
            return _function(source, base_folder, field)
        case ModelSource():
            model = ModelRewards(
                source.path,
                label=source.label,
                chat_template=source.chat_template,
                base_folder=base_folder,
                field=field,
                device=device,
                dtype=source.dtype,
                keep_prompts=keep_prompts,
            )
            model.load()
            return model
        case HttpSource():
            from rlhfspec.training.scoring.rewards.http import HttpRewards

            url, headers = request_of(source, field)
            return HttpRewards(url, headers, concurrency=source.concurrency)


def _function(source: FunctionSource, base_folder: Path, field: str) -> FunctionRewards:
    field = f"{field}.function"
    return FunctionRewards(
        load_function(source.function, base_folder, field=field), batched=source.batched, field=field
    )


def check_functions(rewards: Rewards, base_folder: Path, columns: Mapping[str, str] | None) -> None:
    """Raise InvalidRequest unless all functions can be imported and called with the given columns."""
    for index, source in enumerate(rewards.sources):
        if isinstance(source, FunctionSource):
            function = _function(source, base_folder, f"spec.rewards.sources[{index}]")
            if columns is not None:
                function.check_columns(columns)


def _names(sources: Sequence[AnySource]) -> list[str]:
    given = [source.name for source in sources if source.name is not None]
    names: list[str] = []
    for source in sources:
        name = source.name or _free(_derived(source), {*given, *names})
        names.append(name)
    return names


def _derived(source: AnySource) -> str:
    match source:
        case FunctionSource():
            return source.function.rpartition(":")[2]
        case ModelSource():
            return PurePosixPath(source.path).name or source.path
        case HttpSource():  # never user, password or query, which may hold a secret
            parts = urlsplit(source.url)
            return f"{parts.hostname or ''}{parts.path}".rstrip("/")


def _free(name: str, taken: Collection[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free = f"{name}-{number}"
        number += 1
    return free
