"""The engine's part of the generator: prompts become requests, steps are made in bursts, completions become samples."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhfspec.engine.base import Completion, EngineProtocol, Request, SequenceView
from rlhfspec.engine.params import SamplingParams
from rlhfspec.generator.history import Histories
from rlhfspec.generator.load import Experts, LoadMeter
from rlhfspec.job.generation import Generation
from rlhfspec.messages.records import Prompt, Sample
from rlhfspec.moves.migration.engine_calls import EngineCalls

BURST_SECONDS = 0.05  # so long the engine steps between two looks at what came; a finished sample ends it sooner


class EngineLoop:
    """Runs one engine. `sequences`: those of it that others may take over.

    `meter` counts what its steps report; `calls`, of those that move samples, are made between two steps. `has_news`
    ends a burst early. `prefill_took` is told what a token of a prompt costs, after a step that ran some.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        sequences: Callable[[], tuple[SequenceView, ...]],
        params: SamplingParams,
        meter: LoadMeter,
        calls: EngineCalls,
        *,
        histories: Histories,
        has_news: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.sequences = sequences
        self.prefill_took: Callable[[float], None] = lambda seconds: None
        self._params = params
        self._meter = meter
        self._calls = calls
        self._histories = histories
        self._has_news = has_news

    def submit(self, prompt: Prompt) -> None:
        request = Request(
            id=prompt.id,
            prompt_token_ids=prompt.token_ids,
            params=self._params,
            seed=prompt.seed,
            group=prompt.group_id,
            history=self._histories.of(prompt.token_ids),
        )
        self.engine.submit(request)
        self._meter.submitted(prompt.step)

    def burst(self) -> list[Completion]:
        """Step until something is finished, so that scoring begins with the first sample, or something came."""
        end = time.monotonic() + BURST_SECONDS
        finished: list[Completion] = []
        self._calls.run()
        while self.engine.has_work and not finished and time.monotonic() < end:
            report = self.engine.step()
            self._meter.stepped(report)
            if report.num_prefill_tokens:
                self.prefill_took(self._meter.prefill_seconds)
            finished.extend(report.finished)
            self._calls.run()
            if self._has_news():
                break
        return finished

    def sample(self, prompt: Prompt, completion: Completion, *, seconds: float) -> Sample:
        """Return the record of a finished response, and keep the response for later drafts."""
        self._histories.add(completion.prompt_token_ids, completion.token_ids)
        experts = self._meter.experts()
        return sample_of(prompt, completion, self._meter.name, seconds=seconds, experts=experts)

    async def begun(self) -> list[str]:
        """Return the samples that are worth more than their prompts."""

        def begun() -> list[str]:
            return [each.id for each in self.sequences() if each.num_generated or not each.is_waiting]

        return await self._calls.call(begun)

    def check_nothing_leaked(self) -> None:
        """Without what still runs an engine is empty: no row, no block and no lease of any move is left in it."""
        for each in self.sequences():
            self.engine.cancel(each.id)
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks, f"{stats.num_blocks - stats.num_free_blocks} blocks leaked"


def sampling_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
        ignore_eos=generation.ignore_eos,
    )


def sample_of(
    prompt: Prompt, completion: Completion, generator: str, *, seconds: float = 0.0, experts: Experts = ()
) -> Sample:
    """Pure: the record of a finished response."""
    failed = completion.finish_reason not in ("stop", "length")
    return Sample(
        id=prompt.id,
        job=prompt.job,
        step=prompt.step,
        prompt=prompt.prompt,
        replica=prompt.replica,
        prompt_text=prompt.text,
        prompt_token_ids=prompt.token_ids,
        columns_json=prompt.columns_json,
        text=completion.text or "",
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        tempered_log_probs=completion.tempered_log_probs,
        weights_versions=completion.weights_versions,
        finish_reason="stop" if completion.finish_reason == "stop" else "error" if failed else "length",
        error=completion.error or completion.finish_reason if failed else "",
        num_verifications=completion.stats.num_verifications,
        num_drafted=completion.stats.num_drafted,
        num_accepted=completion.stats.num_accepted,
        strategies=completion.stats.strategies,
        experts=experts,
        seconds=seconds,
        generator=generator,
        purpose=prompt.purpose,
    )
