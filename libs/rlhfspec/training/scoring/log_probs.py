"""Log-probs of responses under the fixed reference model, each a pure function of its sample.

Sequences run on the engine's kernels, so an exact on-policy trainer at version 0 gets the same bits. Prompt and answer
run separately, so that caching changes no bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of its response
Scored = list[float] | InvalidRequest | NumericalError  # a number for each response token, or the error

_BLOCK_SIZE = 16
_CACHED_CONTEXTS = 8  # room for cached prompts, in sequences of the longest kind
_CHUNK_TOKENS = 512  # rows of one forward: enough for the kernels' full speed
_SEQUENCES_A_BATCH = 64  # sequences requested together, and lost with a worker that dies
_LOGITS_AT_A_TIME = 1 << 26  # 256 MB in float32


class LogProbScorer:
    """Thread-safe scorer of a model with fixed weights, whose modules it replaces by kernels in place.

    temperature: of the policy's sampling. dtype, arithmetic: as in the engine. max_context: maximum of prompt plus
    response tokens. keep_prompts: cache a prompt's KV for its other responses.
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
        self.at_once = self._rows.at_once

    def log_probs(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the response tokens' log-probs. Raise NumericalError if one is not finite."""
        return one_of(self.log_probs_of([(prompt_token_ids, token_ids)]))

    def log_probs_of(self, pairs: Sequence[Pair]) -> list[Scored]:
        """Return log-probs or an error for each pair. Calls with `at_once` pairs are fastest."""
        return self._rows.numbers_of(
            pairs, lambda logits, ids: gumbel.token_log_probs(logits, ids, self.temperature), "reference log-prob"
        )


def log_probs_reference(
    model: Any, prompt_token_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> list[float]:
    """Compute log-probs with plain Hugging Face, as a slow reference."""
    tokens = torch.tensor([[*prompt_token_ids, *token_ids]])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0].double() / temperature
    rows = logits[len(prompt_token_ids) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


class SequenceRows:
    """Model on the engine's kernels, evaluated at the positions that predict response tokens."""

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
        self._lock = threading.Lock()  # guards the cache
        on_cpu = torch.device(device).type == "cpu"
        self.runner = ModelRunner(
            model,
            RunnerConfig(
                name=name,
                dtype=kept_as,
                arithmetic=arithmetic_for(kept_as, arithmetic, device),
                device=torch.device(device),
                max_context=max_context,
                num_blocks=num_blocks,
                num_spare_blocks=_CACHED_CONTEXTS * num_blocks if keep_prompts or not on_cpu else 0,
                block_size=_BLOCK_SIZE,
                exact_rows=0 if on_cpu else _CHUNK_TOKENS,
                must_be_exact=False,
            ),
        )
        self._kept = KeptPrompts(num_blocks=len(self.runner.kv), block_size=_BLOCK_SIZE)
        self.at_once = _SEQUENCES_A_BATCH if self.runner.config.exact_rows else 1
        self._slot_table = np.zeros((self.at_once, num_blocks * _BLOCK_SIZE), np.int32)
        most = _CHUNK_TOKENS if self.at_once > 1 else _LOGITS_AT_A_TIME // self.runner.vocab_size
        self._chunk_tokens = max(1, min(_CHUNK_TOKENS, most))

    def load_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        with self._lock:
            self._kept.clear()
            self.runner.load_weights(state_dict)

    def numbers_of(
        self, pairs: Sequence[Pair], read: Callable[[torch.Tensor, IntArray], torch.Tensor], what: str
    ) -> list[Scored]:
        """Return, for each response, `read(outputs [n, width], tokens [n])`: a number per response token.

        Non-finite numbers give a NumericalError that names `what`.
        """
        results: list[Scored] = [[] for _ in pairs]
        asked = []
        for place, pair in enumerate(pairs):
            try:
                asked.append(_Asked(place, *self._checked(*pair)))
            except InvalidRequest as error:
                results[place] = error
        with self._lock:
            for together in self._batches(asked):
                for each, numbers in zip(together, self._run(together, read), strict=True):
                    results[each.place] = finite(numbers, what)
                if any(isinstance(results[each.place], NumericalError) for each in together):
                    self._kept.clear()  # any kept prompt may hold the non-finite numbers
        return results

    def _batches(self, asked: list[_Asked]) -> Iterator[list[_Asked]]:
        """Yield batches, in order, that fit the KV blocks. A shared prompt counts once."""
        together: list[_Asked] = []
        left, prompts = 0, set[bytes]()
        for each in asked:
            border = self._border(each)
            prompt = each.tokens[:border].tobytes()
            own, shared = self._kept.count(len(each.tokens) - border), self._kept.count(border)
            if len(together) == self.at_once or own + shared * (prompt not in prompts) > left:
                if together:
                    yield together
                together, left, prompts = [], self._kept.num_blocks, set()
            left -= own + shared * (prompt not in prompts)
            prompts.add(prompt)
            together.append(each)
        if together:
            yield together

    def _border(self, each: _Asked) -> int:
        return each.first if self._keep_prompts and each.first >= LEAST_TOKENS else 0

    def _run(
        self, together: list[_Asked], read: Callable[[torch.Tensor, IntArray], torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        with ExitStack() as undo:
            undo.callback(self._kept.clear)  # after an error the blocks' content is unknown
            owned, pieces = [], list[_Piece]()
            for row, each in enumerate(together):
                border = self._border(each)
                if border:
                    pieces += self._prompt(row, each.tokens[:border])
                owned.append(self._kept.take(len(each.tokens) - border))
                self._place(row, border, owned[-1])
                pieces.append(_Piece.of(row, each.tokens, border, each.targets))
            parts = [read(*part) for piece in self._cut(pieces) if (part := self._forward(piece)) is not None]
            numbers = torch.cat(parts).cpu()
            for own in owned:
                self._kept.give_back(own)
            undo.pop_all()
        return torch.split(numbers, [len(each.tokens) - each.first for each in together])

    def _prompt(self, row: int, prompt: IntArray) -> list[_Piece]:
        """Assign a prompt's KV slots to a row, and return the pieces to run (none if cached)."""
        held = self._kept.find(prompt)
        blocks = self._kept.take(len(prompt)) if held is None else held
        self._place(row, 0, blocks)
        if held is not None:
            return []
        self._kept.keep(prompt, blocks)
        return [_Piece.of(row, prompt, 0, np.full_like(prompt, -1))]

    def _cut(self, pieces: list[_Piece]) -> Iterator[_Piece]:
        for piece in [_Piece.joined(pieces)] if self.at_once > 1 else pieces:
            for start in range(0, len(piece.tokens), self._chunk_tokens):
                yield piece.part(start, start + self._chunk_tokens)

    def _place(self, row: int, position: int, blocks: list[int]) -> None:
        slots = self._kept.slots(blocks)[: self._slot_table.shape[1] - position]
        self._slot_table[row, position : position + len(slots)] = slots

    def _checked(self, prompt: Sequence[int], response: Sequence[int]) -> tuple[IntArray, IntArray, int]:
        """Return the tokens to run, their targets, and the first position to read.

        The last token is not run. Targets before that position are -1.
        """
        if not prompt or not response:
            raise InvalidRequest("token_ids", [list(prompt), list(response)], "prompt and response must not be empty")
        size = len(prompt) + len(response)
        if size - 1 > self.max_context:
            raise InvalidRequest("token_ids", size, f"prompt and response must fit into {self.max_context} tokens")
        tokens = np.asarray((*prompt, *response), np.int32)
        wrong = tokens[(tokens < 0) | (tokens >= self.runner.num_token_ids)]
        if len(wrong):
            raise InvalidRequest("token_ids", int(wrong[0]), f"must be in [0, {self.runner.num_token_ids})")
        first, targets = len(prompt) - 1, tokens[1:].copy()
        targets[:first] = -1
        return tokens[:-1], targets, first

    def _forward(self, piece: _Piece) -> tuple[torch.Tensor, IntArray] | None:
        meta = AttentionMeta(
            slots=self._slot_table[piece.rows, piece.positions],
            table_rows=piece.rows,
            context_lens=piece.positions + np.int32(1),
            extra=np.empty((len(piece.rows), 0), np.int32),
            slot_table=self._slot_table[: piece.rows.max() + 1],
        )
        read = np.flatnonzero(piece.targets >= 0).astype(np.int32)
        output = self.runner.forward(piece.tokens, piece.positions, meta, read, graphed=False)
        return (output, piece.targets[read]) if len(read) else None


@dataclass(frozen=True, slots=True)
class _Asked:
    place: int  # index among the requests
    tokens: IntArray  # to run
    targets: IntArray  # and the token that each predicts
    first: int  # the first whose prediction is read


@dataclass(frozen=True, slots=True)
class _Piece:
    tokens: IntArray
    positions: IntArray
    rows: IntArray  # of the slot table
    targets: IntArray  # -1: its output is not read

    @classmethod
    def of(cls, row: int, tokens: IntArray, start: int, targets: IntArray) -> _Piece:
        positions = np.arange(start, len(tokens), dtype=np.int32)
        return cls(tokens[start:], positions, np.full_like(positions, row), targets[start:])

    @classmethod
    def joined(cls, pieces: list[_Piece]) -> _Piece:
        return cls(*(np.concatenate(each) for each in zip(*(piece._arrays for piece in pieces), strict=True)))

    def part(self, start: int, stop: int) -> _Piece:
        return _Piece(*(each[start:stop] for each in self._arrays))

    @property
    def _arrays(self) -> tuple[IntArray, ...]:
        return self.tokens, self.positions, self.rows, self.targets


def one_of(scored: list[Scored]) -> list[float]:
    [numbers] = scored
    if not isinstance(numbers, list):
        raise numbers
    return numbers


def finite(numbers: torch.Tensor, what: str) -> list[float] | NumericalError:
    wrong = (~numbers.isfinite()).nonzero().flatten().tolist()
    if wrong:
        return NumericalError(f"{what}: {numbers[wrong[0]].item()} at response token {wrong[0]}")
    found: list[float] = numbers.tolist()
    return found
