"""Hugging Face sequence classifier with cached prompts (CPU) or batches (device), if verified at load.

On the CPU, prompts run apart from answers, so that caching changes no bits.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import torch

from rlhfspec.errors import first_line
from rlhfspec.huggingface.structure.trace import FORWARD_ERRORS
from rlhfspec.training.scoring.kept_prompts import LEAST_TOKENS

log = logging.getLogger(__name__)
KEPT_BYTES = 1 << 30
BATCH_TOKENS = 1 << 14  # of one forward on a device, padding included
_PROBE_TOKENS, _PROBE_PROMPT, _NUM_PROBES = 24, 16, 3
# Relative to the largest output; an ignored cache or mask changes far more.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_Asked = tuple[list[int], Future[torch.Tensor]]
_ANEW = "its prompt again, because the model cannot continue from a cached one"
_ALONE = "alone, because the model ignores that shorter ones beside it are padded"


class Classifier:
    """Thread-safe classifier. Concurrent calls may run the same new prompt twice."""

    def __init__(self, model: Any, *, keep_prompts: bool, name: str, most_bytes: int = KEPT_BYTES) -> None:
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._model = model
        self._device = next(model.parameters()).device
        self._pad = getattr(model.config, "pad_token_id", None)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._caches: dict[tuple[int, ...], Any] = {}  # by prompt, the most recently used last
        on_cpu = self._device.type == "cpu"
        self._keeps_prompts = keep_prompts and on_cpu and self._can(self._kept, name, _ANEW)
        batches = not on_cpu and self._pad is not None and self._can(self._together, name, _ALONE)
        self._batches = Batches(self._together) if batches else None

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_shared: int) -> torch.Tensor:
        """Return logits [labels]. num_shared: number of leading tokens that the prompt's responses share."""
        if self._batches is not None:
            return self._batches.ask(list(token_ids))
        prompt, answer = tuple(token_ids[:num_shared]), list(token_ids[num_shared:])
        is_read_from = any(token != self._pad for token in answer)  # read at the last token but padding
        if not self._keeps_prompts or num_shared < LEAST_TOKENS or not is_read_from:
            return self._whole(list(token_ids))
        return self._behind(prompt, answer)

    def clear(self) -> None:
        with self._lock:
            self._caches.clear()

    def _whole(self, token_ids: list[int]) -> torch.Tensor:
        return self._model(self._rows([token_ids])).logits[0]  # type: ignore[no-any-return]

    def _rows(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, device=self._device)

    @torch.inference_mode()
    def _together(self, sequences: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, sequences))
        padded = [[*each, *[self._pad or 0] * (longest - len(each))] for each in sequences]
        mask = [[1] * len(each) + [0] * (longest - len(each)) for each in sequences]
        return self._model(self._rows(padded), attention_mask=self._rows(mask)).logits.cpu()  # type: ignore[no-any-return]

    def _behind(self, prompt: tuple[int, ...], answer: list[int]) -> torch.Tensor:
        """Run an answer after its cached prompt. An error clears the cache."""
        with ExitStack() as undo:
            undo.callback(self.clear)
            cache = copy.deepcopy(self._cache(prompt))  # the answer extends the cache
            logits = self._model(self._rows([answer]), past_key_values=cache, use_cache=True).logits[0]
            undo.pop_all()
        return logits  # type: ignore[no-any-return]

    def _cache(self, prompt: tuple[int, ...]) -> Any:
        with self._lock:
            if prompt in self._caches:
                self._caches[prompt] = self._caches.pop(prompt)
                return self._caches[prompt]
        cache = self._model(self._rows([list(prompt)]), use_cache=True).past_key_values
        with self._lock:
            self._caches[prompt] = cache
            while len(self._caches) > 1 and sum(map(_num_bytes, self._caches.values())) > self._most_bytes:
                del self._caches[next(iter(self._caches))]
        return cache

    def _can(self, outputs: Callable[[list[list[int]]], torch.Tensor], name: str, otherwise: str) -> bool:
        why = self._why_not(outputs)
        if why:
            log.info("%s: every answer runs %s: %s", name, otherwise, why)
        return not why

    @torch.inference_mode()
    def _why_not(self, outputs: Callable[[list[list[int]]], torch.Tensor]) -> str:
        """Compare cached or batched `outputs` with single runs. Return the problem, or "" if they agree."""
        random = torch.Generator().manual_seed(0)
        num_ids = int(self._model.get_input_embeddings().num_embeddings)
        drawn = torch.randint(num_ids, (_NUM_PROBES, _PROBE_TOKENS), generator=random).tolist()
        probes = [probe[place:] for place, probe in enumerate(drawn)]  # of several lengths
        try:
            whole = torch.stack([self._whole(probe) for probe in probes]).float().cpu()
            difference = float((outputs(probes).float().cpu() - whole).abs().max() / whole.abs().max())
        except FORWARD_ERRORS as error:
            return first_line(error)
        finally:
            self.clear()
        near = difference < _TOLERANCES[self._model.dtype]
        return "" if near else f"its outputs differ by {difference:.2g} of the largest output"

    def _kept(self, probes: list[list[int]]) -> torch.Tensor:
        return torch.stack([self._behind(tuple(probe[:_PROBE_PROMPT]), probe[_PROBE_PROMPT:]) for probe in probes])


class Batches:
    """Batcher of sequences from several threads, in the order of their calls.

    run: maps sequences to one output each. A batch has at most `most_tokens` with padding, or one sequence.
    """

    def __init__(self, run: Callable[[list[list[int]]], torch.Tensor], most_tokens: int = BATCH_TOKENS) -> None:
        self._run = run
        self._most_tokens = most_tokens
        self._running = threading.Lock()
        self._waiting: deque[_Asked] = deque()

    def ask(self, token_ids: list[int]) -> torch.Tensor:
        """Return this sequence's output. Sequences of a failed batch rerun singly."""
        mine = (token_ids, Future[torch.Tensor]())
        self._waiting.append(mine)
        with self._running:  # the holder runs the other threads' sequences too
            if not mine[1].done():
                self._waiting.remove(mine)
                self._run_with(mine)
        return mine[1].result()

    def _run_with(self, mine: _Asked) -> None:
        asked = [mine, *self._others(len(mine[0]))]
        try:
            rows = self._run([token_ids for token_ids, _ in asked])
        except FORWARD_ERRORS:
            self._waiting.extendleft(reversed(asked[1:]))
            rows = self._run([mine[0]])
            asked = [mine]
        for (_, answer), row in zip(asked, rows, strict=True):
            answer.set_result(row)

    def _others(self, longest: int) -> Iterator[_Asked]:
        number = 2
        while self._waiting:
            longest = max(longest, len(self._waiting[0][0]))
            if longest * number > self._most_tokens:
                break
            yield self._waiting.popleft()
            number += 1


def _num_bytes(cache: Any) -> int:
    held = [value for layer in cache.layers for value in vars(layer).values()]
    return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
