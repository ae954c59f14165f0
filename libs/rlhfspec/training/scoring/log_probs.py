"""Log-probs of a response under a fixed model, each a pure function of the sample: the reference's part in KL.

The sequence runs through the engine's kernels, whose bits depend on the sequence alone. So a score is the same whenever
it is asked for, whatever was scored before, in chunks of any size, by any worker, with any number of threads; and where
the trainer is exactly on-policy and still at version 0, it is the trainer's own number to the bit.

Answers to one prompt run it once: its KV is kept for those that come later (`KeptPrompts`). The prompt and the answer
are always run apart, so that also where bits depend on the rows of a forward (on a GPU) a prompt that was kept and one
that was not lead to the same number.

Example:
    >>> from rlhfspec.tiny import random_model
    >>> scorer = LogProbScorer(random_model("llama", seed=0), temperature=1.0, max_context=64)
    >>> len(scorer.log_probs((5, 6, 7), (8, 9)))
    2
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.forward.runner import ModelRunner, RunnerConfig
from rlhfspec.errors import InvalidRequest, NumericalError
from rlhfspec.huggingface.structure.causal_lm import max_positions
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.linear import arithmetic_for
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.training.scoring.kept_prompts import LEAST_TOKENS, KeptPrompts

_BLOCK_SIZE = 16
_KEPT_CONTEXTS = 8  # room for prompts that are kept, in sequences of the longest kind; the runner says how many bytes
_CHUNK_TOKENS = 512  # rows of one forward: enough for the kernels' full speed
_LOGITS_AT_A_TIME = 1 << 26  # 256 MB in float32


class LogProbScorer:
    """Scores under one model that never changes. One sequence at a time; calls from several threads wait in line.

    model: a Hugging Face causal LM; it is swapped in place, so hand over a copy. temperature: of the policy that is
    trained, log_softmax(logits / temperature). dtype and arithmetic: how the engine that generates keeps and adds up
    weights (EngineConfig). max_context: tokens of prompt and response. keep_prompts: for answers that share a prompt;
    where every prompt has one answer, running the two apart costs time and keeping brings nothing.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        max_context: int,
        dtype: str = "float32",
        arithmetic: str = "auto",
        device: str = "cpu",
        keep_prompts: bool = True,
    ) -> None:
        self.temperature = temperature
        self._rows = SequenceRows(
            model, "reference", max_context=max_context, dtype=dtype, arithmetic=arithmetic, device=device,
            keep_prompts=keep_prompts,
        )  # fmt: skip
        self.report = self._rows.runner.report

    def log_probs(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Of every response token. Raises NumericalError when the model gives none."""
        targets = np.asarray(token_ids, np.int32)

        def of_targets(place: int, logits: torch.Tensor) -> torch.Tensor:
            return gumbel.token_log_probs(logits, targets[place : place + len(logits)], self.temperature)

        return self._rows.numbers(prompt_token_ids, token_ids, of_targets, "reference log-prob")


def log_probs_reference(
    model: Any, prompt_token_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> list[float]:
    """The same, slow and obvious: plain Hugging Face, one sequence a forward, every row's logits at once."""
    tokens = torch.tensor([[*prompt_token_ids, *token_ids]])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0].double() / temperature
    rows = logits[len(prompt_token_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


class SequenceRows:
    """A model on the engine's kernels that gives the output rows which predict a response's tokens."""

    def __init__(
        self, model: Any, name: str, *, max_context: int, dtype: str, arithmetic: str, device: str, keep_prompts: bool
    ) -> None:
        limit = max_positions(model)
        if limit is not None and max_context > limit:
            raise InvalidRequest("max_context", max_context, f"must be <= the model's {limit} positions")
        kept_as: torch.dtype = getattr(torch, dtype)
        num_blocks = -(-max_context // _BLOCK_SIZE) + 1  # prompt and answer each begin a block
        self.max_context = max_context
        self._keep_prompts = keep_prompts
        self._lock = threading.Lock()  # one cache
        self.runner = ModelRunner(
            model,
            RunnerConfig(
                name=name,
                dtype=kept_as,
                arithmetic=arithmetic_for(kept_as, arithmetic, device),
                device=torch.device(device),
                max_context=max_context,
                num_blocks=num_blocks,
                num_spare_blocks=_KEPT_CONTEXTS * num_blocks if keep_prompts else 0,
                block_size=_BLOCK_SIZE,
            ),
        )
        self._kept = KeptPrompts(num_blocks=len(self.runner.kv), block_size=_BLOCK_SIZE)
        self._slot_table = np.zeros((1, num_blocks * _BLOCK_SIZE), np.int32)
        self._chunk_tokens = max(1, min(_CHUNK_TOKENS, _LOGITS_AT_A_TIME // self.runner.vocab_size))

    def load_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        with self._lock:
            self._kept.clear()
            self.runner.load_weights(state_dict)

    def numbers(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        read: Callable[[int, torch.Tensor], torch.Tensor],
        what: str,
    ) -> list[float]:
        """read(place in the response of the first, output rows [n, width]) -> [n], over all of the response.

        Raises NumericalError when one of them is none; `what` they are.
        """
        tokens = self._checked(prompt, response)
        with self._lock, ExitStack() as undo:
            undo.callback(self._kept.clear)  # after an error nobody knows what its blocks hold
            numbers = finite(self._run(tokens, len(prompt) - 1, read), what)
            undo.pop_all()
        return numbers

    def _run(self, tokens: IntArray, first: int, read: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Outputs are read from row `first` on: of the prompt's last token, which is run with its answer."""
        border = first if self._keep_prompts and first >= LEAST_TOKENS else 0
        if border:
            self._run_prompt(tokens[:border])
        own = self._kept.take(len(tokens) - border)
        self._place(border, own)
        parts = []
        for start, stop in self._chunks(border, len(tokens)):
            rows = np.arange(max(start, first), stop, dtype=np.int32)
            output = self._forward(tokens, start, stop, rows - start)
            if len(rows):
                parts.append(read(int(rows[0]) - first, output))
        self._kept.give_back(own)
        return torch.cat(parts)

    def _run_prompt(self, prompt: IntArray) -> None:
        """Nothing of it is read; afterwards its KV is in the slots that the table says."""
        held = self._kept.find(prompt)
        blocks = self._kept.take(len(prompt)) if held is None else held
        self._place(0, blocks)
        if held is None:
            for start, stop in self._chunks(0, len(prompt)):
                self._forward(prompt, start, stop, np.empty(0, np.int32))
            self._kept.keep(prompt, blocks)

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for start in range(begin, end, self._chunk_tokens):
            yield start, min(end, start + self._chunk_tokens)

    def _place(self, position: int, blocks: list[int]) -> None:
        """What stands at `position` and behind it goes into these blocks."""
        slots = self._kept.slots(blocks)[: self._slot_table.shape[1] - position]
        self._slot_table[0, position : position + len(slots)] = slots

    def _checked(self, prompt: Sequence[int], response: Sequence[int]) -> IntArray:
        """The tokens that are run: the last one of the response predicts nothing."""
        if not prompt or not response:
            raise InvalidRequest("token_ids", [list(prompt), list(response)], "prompt and response must not be empty")
        size = len(prompt) + len(response)
        if size - 1 > self.max_context:
            raise InvalidRequest("token_ids", size, f"prompt and response must fit into {self.max_context} tokens")
        tokens = np.asarray((*prompt, *response), np.int32)
        wrong = tokens[(tokens < 0) | (tokens >= self.runner.num_token_ids)]
        if len(wrong):
            raise InvalidRequest("token_ids", int(wrong[0]), f"must be in [0, {self.runner.num_token_ids})")
        return tokens[:-1]

    def _forward(self, tokens: IntArray, start: int, stop: int, rows: IntArray) -> torch.Tensor:
        positions = np.arange(start, stop, dtype=np.int32)
        meta = AttentionMeta(
            slots=self._slot_table[0, start:stop].copy(),
            table_rows=np.zeros(len(positions), np.int32),
            context_lens=positions + np.int32(1),
            extra=np.empty((len(positions), 0), np.int32),
            slot_table=self._slot_table,
        )
        return self.runner.forward(tokens[start:stop], positions, meta, rows)


def finite(numbers: torch.Tensor, what: str) -> list[float]:
    """The numbers [t], unless one is none."""
    wrong = (~numbers.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NumericalError(f"{what}: {numbers[wrong[0]].item()} at response token {wrong[0]}")
    return numbers.tolist()
