from __future__ import annotations

from collections import OrderedDict

from rlhfspec.engine.base import Completion, Request
from rlhfspec.engine.params import SamplingParams
from rlhfspec.generator.load import Experts
from rlhfspec.job.generation import Generation
from rlhfspec.messages.records import Prompt, Sample

Tokens = tuple[int, ...]
_KEPT_HISTORIES = 4096


class Histories:
    """Newest `keep` responses of each recent prompt, used as drafts, which never change a token.

    >>> histories = Histories(keep=2)
    >>> for response in ((1,), (2,), (3,)):
    ...     histories.add((7, 8), response)
    >>> histories.of((7, 8)), histories.of((9,))
    (((2,), (3,)), ())
    """

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._responses: OrderedDict[Tokens, tuple[Tokens, ...]] = OrderedDict()

    def of(self, prompt: Tokens) -> tuple[Tokens, ...]:
        return self._responses.get(prompt, ())

    def add(self, prompt: Tokens, response: Tokens) -> None:
        self._responses[prompt] = (*self.of(prompt), response)[-self._keep :]
        self._responses.move_to_end(prompt)
        if len(self._responses) > _KEPT_HISTORIES:
            self._responses.popitem(last=False)


def sampling_params(generation: Generation) -> SamplingParams:
    return SamplingParams(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        max_tokens=generation.max_tokens,
        stop=tuple(generation.stop),
        ignore_eos=generation.ignore_eos,
    )


def request_of(prompt: Prompt, params: SamplingParams, history: tuple[Tokens, ...]) -> Request:
    return Request(
        id=prompt.id,
        prompt_token_ids=prompt.token_ids,
        params=params,
        seed=prompt.seed,
        group=prompt.group_id,
        history=history,
    )


def sample_of(prompt: Prompt, completion: Completion, generator: str, *, seconds: float, experts: Experts) -> Sample:
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
