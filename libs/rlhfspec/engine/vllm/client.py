"""vLLM engine. Sequences are kept here and run in a child process, which is restarted if it dies. Torch-free."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from rlhfspec.engine.base import (
    Abilities,
    Completion,
    EngineStats,
    EngineStep,
    FinishReason,
    Gain,
    Manifest,
    MovableByTokens,
    Request,
    SequenceState,
    SequenceView,
)
from rlhfspec.engine.kv import arrival
from rlhfspec.engine.requests import check_request
from rlhfspec.engine.scheduling import text
from rlhfspec.engine.scheduling.sequences import PREEMPTIONS
from rlhfspec.engine.vllm.process import VllmEnded, VllmProcess
from rlhfspec.engine.vllm.sequence import VllmSequence
from rlhfspec.engine.vllm.weights_file import WeightsFile
from rlhfspec.errors import EngineFailed, InvalidRequest, WeightsVersionError
from rlhfspec.messages.records.models import ModelReport

log = logging.getLogger("rlhfspec.vllm")
AHEAD_SECONDS = 0.02
_MOST_TIMES_AHEAD = 8
MOST_RESTARTS = 3  # without a finished sequence
_SEQUENCE_NAMES = count()  # of sequences in a child; a name is never used twice
_NOT_FINITE = "logits: the model gave NaN or infinity for this sequence"


class VllmEngine:
    """Engine backed by a vLLM child, which decodes for `ahead_seconds` per reply, longer without new requests."""

    weights_version: int = 0

    def __init__(
        self,
        child: VllmProcess,
        opened: Mapping[str, Any],
        *,
        max_context: int,
        max_sequences: int,
        step_seconds: float,
        ahead_seconds: float = AHEAD_SECONDS,
        strategy: str = "off",
        tokenizer: text.Tokenizer | None = None,
    ) -> None:
        self._child = child
        self._opened = opened
        self._max_context = max_context
        self._max_sequences = max_sequences
        self._step_seconds = step_seconds
        self._ahead_seconds = self._next_ahead_seconds = ahead_seconds
        self._strategy = strategy
        self._tokenizer = tokenizer
        self._weights = WeightsFile()
        self._sequences: dict[str, VllmSequence] = {}  # by name in the child; waiting or running there
        self._by_id: dict[str, str] = {}
        self._away: dict[str, VllmSequence] = {}  # by id; exported, neither cancelled nor back
        self._new: list[str] = []  # names not yet sent to the child
        self._cancelled: list[str] = []
        self._undelivered: list[Completion] = []  # for the next step's report
        self._gains: list[Gain] = []  # for the next step's report
        self._restarts_in_vain = 0
        self._num_steps = self._num_generated = self._num_prefill = self._num_moves = self._num_recomputed = 0
        self._gauges = {
            "num_running": 0, "num_requests": 0, "num_free_blocks": self._opened["num_blocks"], "num_preempted": 0,
        }  # fmt: skip

    @property
    def abilities(self) -> Abilities:
        return Abilities(moves_tokens=self)

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
        return self._child.pid

    def close(self) -> None:
        self._child.close()

    def submit(self, request: Request) -> None:
        self._validate(request)
        self._enter(VllmSequence(request=request, stop_ids=self._stop_ids(request)))

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        eos = () if request.params.ignore_eos else tuple(self._opened["eos_token_ids"])
        return *request.params.stop_token_ids, *eos

    def _enter(self, sequence: VllmSequence) -> None:
        name = f"{next(_SEQUENCE_NAMES)}"
        self._sequences[name] = sequence
        self._by_id[sequence.request.id] = name
        self._new.append(name)
        sequence.is_running = False

    def _validate(self, request: Request) -> None:
        check_request(
            request, num_token_ids=self._opened["num_token_ids"], most_tokens=self._max_context,
            has_tokenizer=self._tokenizer is not None, weights_version=self.weights_version,
        )  # fmt: skip
        for name in ("top_log_probs", "priority"):
            if value := getattr(request, name):
                raise InvalidRequest(name, value, "needs the engine own")
        if request.id in self._by_id or request.id in self._away:
            raise InvalidRequest("id", request.id, "is already in the engine")

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._undelivered)

    def cancel(self, request_id: str) -> bool:
        name = self._by_id.get(request_id)
        if name is not None:
            self._forget(name)
        return name is not None or self._away.pop(request_id, None) is not None

    def _forget(self, name: str) -> VllmSequence:
        sequence = self._sequences.pop(name)
        del self._by_id[sequence.request.id]
        if name in self._new:
            self._new.remove(name)
        else:
            self._cancelled.append(name)
        return sequence

    def check_integrity(self) -> None:
        assert set(self._by_id.values()) == set(self._sequences), "the two tables differ"
        assert set(self._new) <= set(self._sequences), "a new sequence is not in the table"
        if not self._sequences and self._child.pid is not None:
            self._settle()
            free, blocks = self._gauges["num_free_blocks"], self._opened["num_blocks"]
            assert self._gauges["num_requests"] == 0, "vLLM runs a sequence that is not in the table"
            assert free == blocks, f"{blocks - free} blocks leaked"

    def _settle(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._ask("step", {"add": [], "cancel": cancelled})

    def step(self) -> EngineStep:
        began = time.perf_counter()
        add = [self._sequences[name].order(name) for name in self._new]
        cancel, self._new, self._cancelled = self._cancelled, [], []
        order = {"add": add, "cancel": cancel, "ahead_seconds": self._ahead(is_asked=bool(add or cancel))}
        answer = self._ask("step", order) if self._sequences or cancel else None
        finished, self._undelivered = self._undelivered, []
        if answer is None:  # the child was restarted, or nothing is left to do
            answer = {"num_passes": 1, "num_decoding": 0, "num_prefill_tokens": 0, "drafted": ()}
            return self._report(began, finished, answer, 0)
        num_before = self._num_generated
        finished += self._taken(answer)
        if finished:
            self._restarts_in_vain = 0
        return self._report(began, finished, answer, self._num_generated - num_before)

    def _ahead(self, *, is_asked: bool) -> float:
        """Return the seconds to decode before the next reply, growing while there are no requests."""
        if is_asked or any(each.request.params.stop for each in self._sequences.values()):
            self._next_ahead_seconds = self._ahead_seconds
        seconds = self._next_ahead_seconds
        self._next_ahead_seconds = min(2 * seconds, _MOST_TIMES_AHEAD * self._ahead_seconds)
        return seconds

    def _taken(self, answer: dict[str, Any]) -> list[Completion]:
        arrays, counts, reasons = answer["arrays"], answer["counts"], answer["reasons"]
        num = sum(counts)
        tokens = np.frombuffer(arrays, np.int32)[:num].tolist()
        log_probs, tempered = np.frombuffer(arrays, np.float32)[num:].reshape(2, num).tolist()
        done, begin = list[Completion | None](), 0
        for name, num_new, *counters in zip(
            answer["names"], counts, answer["verifications"], answer["drafted"], strict=True
        ):
            part = slice(begin, begin + num_new)
            begin += num_new
            if (sequence := self._sequences.get(name)) is not None and (num_new or name in reasons):
                columns = tokens[part], log_probs[part], tempered[part]
                done.append(self._take(name, sequence, columns, reasons.get(name), *counters))
        return [each for each in done if each is not None]

    def _take(
        self, name: str, sequence: VllmSequence, columns: tuple[list[int], list[float], list[float]],
        reason: FinishReason | None, num_verified: int, num_drafted: int,
    ) -> Completion | None:  # fmt: skip
        token_ids, log_probs, tempered = columns
        num_new, in_child = len(token_ids), reason
        if not math.isfinite(sum(log_probs)):
            num_new, reason = next(at for at, value in enumerate(log_probs) if not math.isfinite(value)), "error"
        kept = self._first_stop(sequence, token_ids[:num_new])
        if kept is not None:
            num_new, reason = kept, "stop"
        if reason is not None and in_child is None:  # the child would continue it
            self._cancelled.append(name)
        sequence.add(token_ids[:num_new], log_probs[:num_new], tempered[:num_new], self.weights_version)
        accepted = max(num_new - num_verified, 0)
        sequence.count(self._strategy, verified=num_verified, drafted=num_drafted, accepted=accepted)
        self._num_generated += num_new
        self._gains.append(sequence.gain(num_new, reason))
        if reason is None:
            return None
        del self._sequences[name], self._by_id[sequence.request.id]
        return self._completion(sequence, reason, _NOT_FINITE if reason == "error" else "")

    def _first_stop(self, sequence: VllmSequence, token_ids: list[int]) -> int | None:
        stops = sequence.request.params.stop
        if not stops or self._tokenizer is None:
            return None
        response = np.asarray([*sequence.token_ids, *token_ids], np.int32)
        return text.first_stop(self._tokenizer, response, len(token_ids), stops)

    def _completion(self, sequence: VllmSequence, reason: FinishReason, error: str) -> Completion:
        words = text.decode(self._tokenizer, sequence.token_ids)
        if words is not None:
            words = text.cut_at_stop(words, sequence.request.params.stop)
        return sequence.completion(reason, error=error, text=words)

    def _report(
        self, began: float, finished: list[Completion], answer: Mapping[str, Any], num_committed: int
    ) -> EngineStep:
        self._num_steps += 1
        self._num_prefill += answer["num_prefill_tokens"]
        gains, self._gains = tuple(self._gains), []
        return EngineStep(
            gains=gains,
            finished=tuple(finished),
            num_decoding=answer["num_decoding"],
            num_prefill_tokens=answer["num_prefill_tokens"],
            num_verified_nodes=sum(answer["drafted"]),
            num_committed=num_committed,
            num_passes=answer["num_passes"],
            strategy=self._strategy,
            seconds=time.perf_counter() - began,
        )

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Send a command to the child; return None if it died and was restarted."""
        try:
            answer = self._child.ask(name, arguments, seconds=self._step_seconds)
        except VllmEnded as ended:
            self._start_again(ended)
            return None
        self._gauges |= {each: answer[each] for each in self._gauges if each in answer}
        return answer

    def _start_again(self, ended: VllmEnded) -> None:
        self._restarts_in_vain += 1
        if self._restarts_in_vain > MOST_RESTARTS:
            raise EngineFailed("vllm", f"{ended}; it was started {MOST_RESTARTS} times without finishing a sequence")
        log.warning("vLLM's process ended and is being restarted: %s", ended)
        try:
            self._child.start()
            self._child.ask("begin", {"weights": self._weights.path}, seconds=self._step_seconds)
        except VllmEnded as again:
            return self._start_again(again)
        self._new, self._cancelled = list(self._sequences), []
        for each in self._sequences.values():
            each.counters[PREEMPTIONS] += each.is_running
            each.is_running = False
        self._gauges |= {"num_running": 0, "num_free_blocks": self._opened["num_blocks"], "num_requests": 0}

    def load_weights(self, state_dict: Mapping[str, Any], *, version: int) -> None:
        if version <= self.weights_version:
            raise WeightsVersionError(version, self.weights_version, "must grow with every swap")
        self._weights.write(state_dict, version)
        self._settle()
        self._ask("load", {"weights": self._weights.path})  # a child that dies here restarts with this version
        self.weights_version = version
        self._refuse_pinned()

    def _refuse_pinned(self) -> None:
        for name, sequence in list(self._sequences.items()):
            pinned = sequence.request.weights_version
            if pinned not in (None, self.weights_version):
                self._forget(name)
                error = f"weights_version: the request wants {pinned}, the engine now has {self.weights_version}"
                self._undelivered.append(self._completion(sequence, "error", error))
                self._gains.append(sequence.gain(0, "error"))

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
            num_moves=self._num_moves,
            num_recomputed_tokens=self._num_recomputed,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        return tuple(sequence.view() for sequence in self._sequences.values())

    @property
    def _architecture(self) -> str:
        return f"{self._opened['arithmetic']} {self._opened['model']}"

    def manifest(self, request_id: str) -> Manifest:
        name = self._by_id.get(request_id, "")
        sequence = self._sequences.get(name) or self._away.get(request_id)
        if sequence is None:
            raise InvalidRequest("request_id", request_id, "no such sequence here")
        return sequence.manifest(self._architecture, self.weights_version)

    def export_sequence(self, request_id: str) -> SequenceState:
        if request_id not in self._by_id:
            raise InvalidRequest("request_id", request_id, "no such sequence here")
        manifest = self.manifest(request_id)
        sequence = self._away[request_id] = self._forget(self._by_id[request_id])
        return sequence.state(manifest)

    def reattach(self, request_id: str) -> None:
        if request_id not in self._away:
            raise InvalidRequest("request_id", request_id, "was not exported from here")
        self._enter(self._away.pop(request_id))
        self._refuse_pinned()

    def import_sequence(self, arrived: SequenceState) -> None:
        arrival.check_type("state", arrived, SequenceState)
        manifest = arrived.manifest
        arrival.check_manifest(manifest, architecture=self._architecture, weights_version=self.weights_version)
        self._validate(manifest.request)
        stop_ids = self._stop_ids(manifest.request)
        arrival.check_state(arrived, self._opened["num_token_ids"], stop_ids)
        self._enter(VllmSequence.moved(arrived, stop_ids))
        self._num_moves += 1
        self._num_recomputed += manifest.num_tokens - 1 if len(arrived.log_probs) else 0


_: type[MovableByTokens] = VllmEngine  # mypy checks the protocol
