"""One sequence that vLLM generates, with all that is needed to request the rest of it from any child."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlhfspec.engine.base import Completion, FinishReason, Gain, Manifest, Request, SequenceState, SequenceView
from rlhfspec.engine.kv.arrival import SCHEMA
from rlhfspec.engine.scheduling.sequences import ACCEPTED, DRAFTED, MOVES, NUM_COUNTERS, VERIFICATIONS, stats_of


@dataclass(slots=True, kw_only=True)
class VllmSequence:
    request: Request
    stop_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)  # of the response, like all that follow
    log_probs: list[float] = field(default_factory=list)
    tempered_log_probs: list[float] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=lambda: [0] * NUM_COUNTERS)
    strategies: dict[str, int] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)
    is_running: bool = False  # tokens came since the last request

    def order(self, name: str) -> dict[str, Any]:
        request, params = self.request, self.request.params
        prompt = request.prompt_token_ids
        law = {
            "seed": request.seed, "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p,
            "num_prompt": len(prompt),
        }  # fmt: skip
        return {
            "name": name,
            "prompt": [*prompt, *self.token_ids],
            "max_tokens": params.max_tokens - len(self.token_ids),
            "stop_token_ids": list(self.stop_ids),
            "law": law,
        }

    def add(
        self, token_ids: list[int], log_probs: list[float], tempered_log_probs: list[float], version: int
    ) -> None:  # fmt: skip
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.tempered_log_probs += tempered_log_probs
        self.weights_versions += [version] * len(token_ids)
        self.is_running = True

    def gain(self, num_new: int, reason: FinishReason | None) -> Gain:
        begin = len(self.token_ids) - num_new
        return Gain(
            id=self.request.id, token_ids=np.array(self.token_ids[begin:], np.int32),
            log_probs=np.array(self.log_probs[begin:], np.float32),
            tempered_log_probs=np.array(self.tempered_log_probs[begin:], np.float32), finish_reason=reason,
        )  # fmt: skip

    def count(self, strategy: str, *, verified: int, drafted: int, accepted: int) -> None:
        self.counters[VERIFICATIONS] += verified
        self.counters[DRAFTED] += drafted
        self.counters[ACCEPTED] += accepted
        self.strategies[strategy] = self.strategies.get(strategy, 0) + verified

    def completion(self, reason: FinishReason, *, error: str = "", text: str | None) -> Completion:
        return Completion(
            id=self.request.id, prompt_token_ids=self.request.prompt_token_ids, token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs), tempered_log_probs=tuple(self.tempered_log_probs),
            weights_versions=tuple(self.weights_versions), finish_reason=reason, error=error, text=text,
            stats=stats_of(self.counters, self.strategies.items()),
        )  # fmt: skip

    def view(self) -> SequenceView:
        num_held = len(self.request.prompt_token_ids) + len(self.token_ids)
        return SequenceView(
            id=self.request.id, num_generated=len(self.token_ids), num_held=num_held,
            num_prefill=0 if self.is_running else num_held, is_waiting=not self.is_running,
        )  # fmt: skip

    def manifest(self, architecture: str, weights_version: int) -> Manifest:
        return Manifest(
            schema=SCHEMA, fingerprints=("",), architecture=architecture, weights_version=weights_version, epoch=0,
            num_tokens=len(self.request.prompt_token_ids) + len(self.token_ids),
            request=replace(self.request, history=()),
        )  # fmt: skip

    def state(self, manifest: Manifest) -> SequenceState:
        return SequenceState(
            manifest=manifest, rest=None,
            token_ids=np.array([*self.request.prompt_token_ids, *self.token_ids], np.int32),
            log_probs=np.array(self.log_probs, np.float32),
            tempered_log_probs=np.array(self.tempered_log_probs, np.float32),
            weights_versions=np.array(self.weights_versions, np.int32), counters=tuple(self.counters),
            strategies=tuple(sorted(self.strategies.items())), acceptance=(), history=self.request.history,
            age_seconds=time.monotonic() - self.arrived,
        )  # fmt: skip

    @classmethod
    def moved(cls, state: SequenceState, stop_ids: tuple[int, ...]) -> VllmSequence:
        request, counters = state.manifest.request, list(state.counters)
        counters[MOVES] += 1
        return cls(
            request=replace(request, history=state.history), stop_ids=stop_ids,
            token_ids=state.token_ids[len(request.prompt_token_ids) :].tolist(), log_probs=state.log_probs.tolist(),
            tempered_log_probs=state.tempered_log_probs.tolist(), weights_versions=state.weights_versions.tolist(),
            counters=counters, strategies=dict(state.strategies), arrived=time.monotonic() - state.age_seconds,
        )  # fmt: skip
