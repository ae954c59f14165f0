"""A Hugging Face sequence classifier that runs a prompt once for its answers, where its class can go on behind a cache.

Prompt and answer are then always run apart, so that a prompt that was kept and one that was not lead to the same bits.
A class that cannot (it looks ahead, or knows no cache) runs every sample as one sequence, and it is said once.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rlhfspec.huggingface.trace import FORWARD_ERRORS, first_line
from rlhfspec.training.scoring.kept_prompts import LEAST_TOKENS

log = logging.getLogger(__name__)
KEPT_BYTES = 1 << 30
_PROBE_TOKENS, _PROBE_PROMPT, _NUM_PROBES = 24, 16, 3
_TOLERANCE = 1e-3  # of the largest output; a cache that is not seen, or only in part, changes far more


class Classifier:
    """Calls may come from several threads: two that want the same new prompt at once both run it."""

    def __init__(self, model: Any, *, keep_prompts: bool, name: str, most_bytes: int = KEPT_BYTES) -> None:
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._model = model
        self._pad = getattr(model.config, "pad_token_id", None)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._caches: dict[tuple[int, ...], Any] = {}  # by the prompt; the one that was used last stands last
        self._keeps_prompts = keep_prompts and self._can_keep(name)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_shared: int) -> torch.Tensor:
        """[labels]. num_shared: so many of the tokens stand in front of every answer to this prompt."""
        prompt, answer = tuple(token_ids[:num_shared]), list(token_ids[num_shared:])
        is_read_from = any(token != self._pad for token in answer)  # the output is that of the last token but padding
        if not self._keeps_prompts or num_shared < LEAST_TOKENS or not is_read_from:
            return self._whole(list(token_ids))
        return self._behind(prompt, answer)

    def clear(self) -> None:
        with self._lock:
            self._caches.clear()

    def _whole(self, token_ids: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([token_ids])).logits[0]  # type: ignore[no-any-return]

    def _behind(self, prompt: tuple[int, ...], answer: list[int]) -> torch.Tensor:
        """Whatever fails, nothing is kept."""
        with ExitStack() as undo:
            undo.callback(self.clear)
            cache = copy.deepcopy(self._cache(prompt))  # what an answer adds is not the prompt's
            logits = self._model(torch.tensor([answer]), past_key_values=cache, use_cache=True).logits[0]
            undo.pop_all()
        return logits  # type: ignore[no-any-return]

    def _cache(self, prompt: tuple[int, ...]) -> Any:
        with self._lock:
            if prompt in self._caches:
                self._caches[prompt] = self._caches.pop(prompt)
                return self._caches[prompt]
        cache = self._model(torch.tensor([prompt]), use_cache=True).past_key_values
        with self._lock:
            self._caches[prompt] = cache
            while len(self._caches) > 1 and sum(map(_num_bytes, self._caches.values())) > self._most_bytes:
                del self._caches[next(iter(self._caches))]
        return cache

    def _can_keep(self, name: str) -> bool:
        why = self._why_not()
        if why:
            log.info("%s: every answer runs its prompt anew, for the model cannot go on behind one: %s", name, why)
        return not why

    @torch.inference_mode()
    def _why_not(self) -> str:
        """Tried, since a class may take a cache and ignore it."""
        random = torch.Generator().manual_seed(0)
        num_ids = int(self._model.get_input_embeddings().num_embeddings)
        probes = torch.randint(num_ids, (_NUM_PROBES, _PROBE_TOKENS), generator=random)
        try:
            whole = torch.stack([self._whole(probe) for probe in probes.tolist()])
            parts = [self._behind(tuple(probe[:_PROBE_PROMPT]), probe[_PROBE_PROMPT:]) for probe in probes.tolist()]
        except FORWARD_ERRORS as error:
            return first_line(error)
        finally:
            self.clear()
        difference = float((torch.stack(parts) - whole).abs().max() / whole.abs().max())
        return "" if difference < _TOLERANCE else f"its outputs differ by {difference:.2g} of the largest"


def _num_bytes(cache: Any) -> int:
    held = [value for layer in cache.layers for value in vars(layer).values()]
    return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
