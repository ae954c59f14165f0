"""vLLM as an engine: sequences here, computed in a child that may die and is started again. Torch-free."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from rlhfspec.engine.base import (
    Completion,
    EngineStats,
    EngineStep,
    FinishReason,
    HasProcess,
    Request,
    SequenceStats,
    check_types,
)
from rlhfspec.engine.scheduling import text
from rlhfspec.engine.vllm.process import VllmEnded, VllmProcess
from rlhfspec.engine.vllm.weights_file import WeightsFile
from rlhfspec.errors import EngineFailed, InvalidRequest, WeightsVersionError
from rlhfspec.messages.records.models import ModelReport

log = logging.getLogger("rlhfspec.vllm")
MOST_RESTARTS = 3  # without a finished sequence
_NAMES = count()  # of sequences in a child, which is never told one twice
_NOT_FINITE = "logits: the model gave NaN or infinity for this sequence"


@dataclass(slots=True, kw_only=True)
class _Sequence:
    request: Request
    stop_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tempered_log_probs: list[float] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    num_verifications: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_restarts: int = 0

    def order(self, name: str) -> dict[str, Any]:
        """As the child is asked for the rest of it."""
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

    def completion(self, reason: FinishReason, strategy: str, *, error: str = "", text: str | None) -> Completion:
        stats = SequenceStats(
            num_verifications=self.num_verifications, num_drafted=self.num_drafted, num_accepted=self.num_accepted,
            num_preemptions=self.num_restarts, strategies=((strategy, self.num_verifications),),
        )  # fmt: skip
        return Completion(
            id=self.request.id, prompt_token_ids=self.request.prompt_token_ids, token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs), tempered_log_probs=tuple(self.tempered_log_probs),
            weights_versions=tuple(self.weights_versions), finish_reason=reason, error=error, text=text, stats=stats,
        )  # fmt: skip


class VllmEngine:
    """`rlhfspec.engine.base.EngineProtocol` is its contract. Its sequences do not move.

    `opened`: what the child answered at its start. `strategy`: how it drafts, for those that look on.
    """

    def __init__(
        self,
        child: VllmProcess,
        opened: Mapping[str, Any],
        *,
        max_context: int,
        max_sequences: int,
        step_seconds: float,
        strategy: str = "off",
        tokenizer: text.Tokenizer | None = None,
    ) -> None:
        self._child = child
        self._opened = opened
        self._max_context = max_context
        self._max_sequences = max_sequences
        self._step_seconds = step_seconds
        self._strategy = strategy
        self._tokenizer = tokenizer
        self._weights = WeightsFile()
        self.weights_version = 0
        self._sequences: dict[str, _Sequence] = {}  # by name in the child; waiting or running there
        self._by_id: dict[str, str] = {}
        self._new: list[str] = []  # names that the child was not told yet
        self._cancelled: list[str] = []
        self._undelivered: list[Completion] = []
        self._restarts_in_vain = 0
        self._num_steps = self._num_generated = self._num_prefill = 0
        self._gauges = {"num_running": 0, "num_free_blocks": self._opened["num_blocks"], "num_preempted": 0}

    @property
    def reports(self) -> dict[str, ModelReport]:
        opened, difference = self._opened, self._opened.get("difference")
        report = ModelReport(
            model=opened["model"], path="vllm", attentions=(), guarded=(),
            probes=("law",) if difference is None else ("law", "hugging face"),
            difference=0.0 if difference is None else difference, noise=0.0,
            bits=opened["arithmetic"], attention_split=None, seconds=opened.get("seconds", 0.0),
        )  # fmt: skip
        return {"model": report}

    @property
    def pid(self) -> int | None:
        """Of the child."""
        return self._child.pid

    def close(self) -> None:
        """End the child."""
        self._child.close()

    # -- sequences --------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self._validate(request)
        params = request.params
        eos = () if params.ignore_eos else tuple(self._opened["eos_token_ids"])
        name = f"{next(_NAMES)}"
        self._sequences[name] = _Sequence(request=request, stop_ids=(*params.stop_token_ids, *eos))
        self._by_id[request.id] = name
        self._new.append(name)

    def _validate(self, request: Request) -> None:
        check_types(request)
        params, vocabulary = request.params, self._opened["num_token_ids"]
        for field_name, ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise InvalidRequest(field_name, token, f"token id outside [0, {vocabulary})")
        num_prompt, limit = len(request.prompt_token_ids), self._max_context
        if num_prompt >= limit:
            raise InvalidRequest("prompt_token_ids", f"{num_prompt} tokens", f"must be shorter than {limit}")
        if num_prompt + params.max_tokens > limit:
            problem = f"with a prompt of {num_prompt} must be <= {limit - num_prompt}"
            raise InvalidRequest("max_tokens", params.max_tokens, problem)
        if params.stop and self._tokenizer is None:
            raise InvalidRequest("stop", params.stop, "stop strings need a tokenizer, and the model folder holds none")
        if request.weights_version not in (None, self.weights_version):
            raise WeightsVersionError(request.weights_version or 0, self.weights_version, "not the loaded one")
        if request.id in self._by_id:
            raise InvalidRequest("id", request.id, "is here already")

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._undelivered)

    def cancel(self, request_id: str) -> bool:
        name = self._by_id.get(request_id)
        if name is not None:
            self._forget(name)
        return name is not None

    def _forget(self, name: str) -> None:
        """Here, and at the next step in the child."""
        del self._by_id[self._sequences.pop(name).request.id]
        if name in self._new:
            self._new.remove(name)
        else:
            self._cancelled.append(name)

    def check_integrity(self) -> None:
        assert set(self._by_id.values()) == set(self._sequences), "the two tables differ"
        assert set(self._new) <= set(self._sequences), "one is to be told that is not here"
        if not self._sequences and self._child.pid is not None:
            self._settle()
            free, blocks = self._gauges["num_free_blocks"], self._opened["num_blocks"]
            assert self._gauges["num_requests"] == 0, "the child runs what is not here"
            assert free == blocks, f"{blocks - free} blocks leaked"

    def _settle(self) -> None:
        """Tell the child what was cancelled, where no step will."""
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._ask("step", {"add": [], "cancel": cancelled})

    # -- a step -----------------------------------------------------------------------------------------------

    def step(self) -> EngineStep:
        began = time.perf_counter()
        add = [self._sequences[name].order(name) for name in self._new]
        cancel, self._new, self._cancelled = self._cancelled, [], []
        answer = self._ask("step", {"add": add, "cancel": cancel}) if self._sequences or cancel else None
        undelivered, self._undelivered = self._undelivered, []
        if answer is None:  # the child was started anew, or nothing is left to do
            return self._report(began, undelivered, {"num_decoding": 0, "num_prefill_tokens": 0, "drafted": {}}, 0)
        num_before, finished = self._num_generated, list(undelivered)
        for name, token_ids, log_probs, tempered, reason in answer["new"]:
            if name in self._sequences and (token_ids or reason):
                drafted = answer["drafted"].get(name, 0)
                done = self._take(name, token_ids, log_probs, tempered, reason, drafted)
                finished += [done] if done is not None else []
        if finished:
            self._restarts_in_vain = 0
        return self._report(began, finished, answer, self._num_generated - num_before)

    def _take(
        self, name: str, token_ids: list[int], log_probs: list[float], tempered: list[float],
        reason: FinishReason | None, drafted: int,
    ) -> Completion | None:  # fmt: skip
        """New tokens of one sequence, as far as none ends it; the completion if it is finished."""
        sequence, in_child = self._sequences[name], reason
        finite = next((at for at, value in enumerate(log_probs) if not math.isfinite(value)), len(token_ids))
        if finite < len(token_ids):
            token_ids, reason = token_ids[:finite], "error"
        kept = self._first_stop(sequence, token_ids)
        if kept is not None:
            token_ids, reason = token_ids[:kept], "stop"
        if reason is not None and in_child is None:  # it would go on
            self._cancelled.append(name)
        num_new = len(token_ids)
        sequence.token_ids += token_ids
        sequence.log_probs += log_probs[:num_new]
        sequence.tempered_log_probs += tempered[:num_new]
        sequence.weights_versions += [self.weights_version] * num_new
        sequence.num_verifications += 1
        sequence.num_drafted += drafted
        sequence.num_accepted += max(num_new - 1, 0)
        self._num_generated += num_new
        if reason is None:
            return None
        del self._sequences[name], self._by_id[sequence.request.id]
        return self._completion(sequence, reason, _NOT_FINITE if reason == "error" else "")

    def _first_stop(self, sequence: _Sequence, token_ids: list[int]) -> int | None:
        stops = sequence.request.params.stop
        if not stops or self._tokenizer is None:
            return None
        response = np.asarray([*sequence.token_ids, *token_ids], np.int32)
        return text.first_stop(self._tokenizer, response, len(token_ids), stops)

    def _completion(self, sequence: _Sequence, reason: FinishReason, error: str) -> Completion:
        words = text.decode(self._tokenizer, sequence.token_ids)
        if words is not None:
            words = text.cut_at_stop(words, sequence.request.params.stop)
        return sequence.completion(reason, self._strategy, error=error, text=words)

    def _report(
        self, began: float, finished: list[Completion], answer: Mapping[str, Any], num_committed: int
    ) -> EngineStep:
        self._num_steps += 1
        self._num_prefill += answer["num_prefill_tokens"]
        return EngineStep(
            finished=tuple(finished),
            num_decoding=answer["num_decoding"],
            num_prefill_tokens=answer["num_prefill_tokens"],
            num_verified_nodes=sum(answer["drafted"].values()),
            num_committed=num_committed,
            strategy=self._strategy,
            seconds=time.perf_counter() - began,
        )

    # -- the child --------------------------------------------------------------------------------------------

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """None: the child died, and was started again; what ran is asked for again at the next step."""
        try:
            answer = self._child.ask(name, arguments, seconds=self._step_seconds)
        except VllmEnded as ended:
            self._start_again(ended)
            return None
        self._gauges |= {each: answer[each] for each in self._gauges.keys() | {"num_requests"} if each in answer}
        return answer

    def _start_again(self, ended: VllmEnded) -> None:
        self._restarts_in_vain += 1
        if self._restarts_in_vain > MOST_RESTARTS:
            raise EngineFailed("vllm", f"{ended}; it was started {MOST_RESTARTS} times without finishing a sequence")
        log.warning("vLLM's process ended and is started again: %s", ended)
        try:
            self._child.start()
            self._child.ask("begin", {"weights": self._weights.path}, seconds=self._step_seconds)
        except VllmEnded as again:
            return self._start_again(again)
        self._new, self._cancelled = list(self._sequences), []
        for each in self._sequences.values():
            each.num_restarts += bool(each.token_ids)
        self._gauges |= {"num_running": 0, "num_free_blocks": self._opened["num_blocks"], "num_requests": 0}

    def load_weights(self, state_dict: Mapping[str, Any], *, version: int) -> None:
        if version <= self.weights_version:
            raise WeightsVersionError(version, self.weights_version, "must grow with every swap")
        self._weights.write(state_dict, version)
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._ask("step", {"add": [], "cancel": cancelled})
        self._ask("load", {"weights": self._weights.path})  # a child that died here begins with this version
        self.weights_version = version
        for name, sequence in list(self._sequences.items()):
            pinned = sequence.request.weights_version
            if pinned not in (None, version):
                self._forget(name)
                error = f"weights_version: the request wants {pinned}, the engine now has {version}"
                self._undelivered.append(self._completion(sequence, "error", error))

    def stats(self) -> EngineStats:
        num_running = self._gauges["num_running"] if self._sequences else 0
        free = self._gauges["num_free_blocks"] if self._sequences else self._opened["num_blocks"]
        size, blocks = self._opened["block_size"], self._opened["num_blocks"]
        num_waiting = len(self._sequences) - min(num_running, len(self._sequences))
        each = max(self._max_context // size, 1)
        return EngineStats(
            num_running=min(num_running, len(self._sequences)),
            num_waiting=num_waiting,
            room=max(min(self._max_sequences - len(self._sequences), free // each or 1), 0),
            num_free_blocks=free,
            num_free_tokens=free * size,
            num_blocks=blocks,
            weights_version=self.weights_version,
            num_steps=self._num_steps,
            num_generated_tokens=self._num_generated,
            num_preemptions=self._gauges["num_preempted"],
            num_prefill_tokens=self._num_prefill,
        )


_: type[HasProcess] = VllmEngine  # mypy holds it to the contract
