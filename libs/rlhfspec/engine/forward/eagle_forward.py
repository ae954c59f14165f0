"""Drafting with an EAGLE-3 or MTP head, whose keys, values and input states lie beside the policy's in its KV cache.

The state of position p and the token of p + 1 are one input of the head. Its keys and values are kept at p, and its
output, which stands in for the state of p + 1 until the policy has run, at p + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlhfspec.common.arrays import FloatArray, IntArray, concatenate_ranges
from rlhfspec.engine.drafting.model import DraftRows
from rlhfspec.engine.forward.draft_forward import InSpace
from rlhfspec.engine.forward.runner import ModelRunner, Taps
from rlhfspec.engine.kv.space import KVSpace, SharedSpace
from rlhfspec.engine.scheduling.sequences import RowTable
from rlhfspec.huggingface.fused.casting import Precision, cast
from rlhfspec.huggingface.fused.fuse import fuse_layer
from rlhfspec.huggingface.heads.eagle import EagleHead
from rlhfspec.huggingface.heads.mtp import MtpHead
from rlhfspec.huggingface.structure.attention import fit_cache
from rlhfspec.kernels import gumbel
from rlhfspec.kernels.linear import PackedLinear
from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray, tree_attention

PolicyHead = EagleHead | MtpHead
_CAUGHT_UP_AT_ONCE = 4096  # positions whose keys and values are computed together


def taps_of(head: PolicyHead, num_layers: int) -> Taps:
    layers, width = head.layers_tapped(num_layers), head.config.hidden_size
    return Taps(name=head.name, layers=layers, attention=head.attention(num_layers), width=width)


class EagleForward(InSpace):
    """Forwards of an EAGLE-3 or MTP head over the policy's slots.

    Accepted nodes' keys and values are computed again, from the policy's states.
    """

    def __init__(self, head: PolicyHead, space: KVSpace, rows: RowTable) -> None:
        super().__init__(SharedSpace(space, space.runner))
        self._runner = runner = space.runner
        assert runner.config.taps is not None
        self._spec = runner.config.taps.attention
        self._head = _for_inference(head, runner)
        if isinstance(self._head, MtpHead):
            self._head.logits = runner.parts.logits
        self._embed = self._head.embed_tokens or runner.fused.model.get_input_embeddings()
        self._rows = rows
        self._block_size = runner.config.block_size
        self._width = runner.config.taps.width
        self._token_ids = self._head.token_ids
        self._known: IntArray = np.zeros(len(space.cached), np.int32)  # leading positions with keys and values

    @property
    def device(self) -> torch.device:
        return self._runner.config.device

    @property
    def shapes(self) -> str:
        """Return what decides the time of a forward, besides the policy's kernels."""
        return f"{self._head.shapes} {self._spec}"

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Exchange the head's weights. Kept states of the policy stay as the old ones made them."""
        assert isinstance(self._head, EagleHead), "others do not learn"
        for name, parameter in weights.items():
            if name == "d2t":
                self._head.d2t.copy_(parameter)
                continue
            path, _, leaf = name.rpartition(".")
            module = self._head.get_submodule(path)
            if isinstance(module, PackedLinear):
                if leaf == "weight":
                    module.load_weight(parameter, weights.get(f"{path}.bias"))
            else:
                getattr(module, leaf).copy_(parameter)
        self._token_ids = self._head.token_ids
        self._known[:] = 0

    def states_of(self, rows: IntArray) -> torch.Tensor:
        """Return what the policy's last forward told of its rows, as bfloat16 on the host."""
        return self._runner.tapped[self._index(rows)].flatten(1).to("cpu", torch.bfloat16)

    @torch.inference_mode()
    def store(self, slots: IndexArray) -> None:
        """Keep the states of the policy's last forward at `slots`."""
        self._write_states(self._index(slots), self._head.first_states(self._runner.tapped))

    def candidates(self, rows: DraftRows, k: int) -> tuple[IntArray, FloatArray]:
        extra, table_rows = rows.extra, rows.table_rows
        before = np.maximum(rows.positions - np.int32(1), 0)  # the first token of all has no state before it
        is_root = not extra.shape[1]
        if is_root:
            self._catch_up(table_rows, before)
            self._known[table_rows] = rows.positions  # the last follows below
        if extra.shape[1] > 1:
            parents = extra[:, -2]
        else:
            parents = self.slots[table_rows, before if is_root else rows.context_lens - 1]
        meta = AttentionMeta(
            slots=parents if is_root else rows.slots, table_rows=table_rows,
            context_lens=rows.context_lens - np.int32(1), extra=extra, slot_table=self.slots,
        )  # fmt: skip
        meta, given = self._space.stage(
            meta, tokens=rows.tokens, positions=before, parents=parents, at=rows.slots, logit_rows=rows.logit_rows,
            seeds=rows.seeds, noise_positions=rows.noise_positions, temperatures=rows.temperatures,
        )  # fmt: skip
        logits = self._run(given, meta)
        drawn = gumbel.candidates(logits, given["seeds"], given["noise_positions"], given["temperatures"], k)
        tokens, scores = self._space.staging.down(drawn)
        return tokens, scores

    def forget(self, row: int) -> None:
        self._known[row] = 0

    @torch.inference_mode()
    def _run(self, given: Mapping[str, IndexArray], meta: AttentionMeta) -> torch.Tensor:
        runner, spec = self._runner, self._spec

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
            query = functional.pad(query, (0, runner.kv_shape[3] - spec.key_dim))
            attended = tree_attention(
                query, self._fit(key), self._fit(value), runner.kv, spec.index, meta,
                scale=scale, sliding_window=spec.window, split=runner.config.attention_split,
            )  # fmt: skip
            return attended[..., : spec.value_dim]

        embedded = self._embed(self._index(given["tokens"]))
        before = self._read_states(self._index(given["parents"]))
        states = self._head(embedded, before, self._index(given["positions"]), attend)
        self._write_states(self._index(given["at"]), states)
        return self._logits(states.index_select(0, self._index(given["logit_rows"])))

    def _catch_up(self, table_rows: IntArray, ends: IntArray) -> None:
        """Compute the keys and values of the rows' positions below `ends`."""
        counts = np.maximum(ends - self._known[table_rows], 0)
        rows, positions = np.repeat(table_rows, counts), concatenate_ranges(ends - counts, counts)
        for first in range(0, len(rows), _CAUGHT_UP_AT_ONCE):
            self._fill(rows[first : first + _CAUGHT_UP_AT_ONCE], positions[first : first + _CAUGHT_UP_AT_ONCE])

    @torch.inference_mode()
    def _fill(self, rows: IntArray, positions: IntArray) -> None:
        slots, chosen = np.unique(self.slots[rows, positions], return_index=True)  # samples of a prompt share slots
        rows, positions = rows[chosen], positions[chosen]
        at = self._index(slots)
        following = self._index(self._rows.tokens[rows, positions + 1])
        kept = self._head.kept(self._embed(following), self._read_states(at), self._index(positions))
        block, offset = at // self._block_size, at % self._block_size
        for place, states in enumerate(kept):
            self._runner.kv[block, self._spec.index, place, offset] = self._fit(states).to(self._runner.kv.dtype)

    def _read_states(self, slots: torch.Tensor) -> torch.Tensor:
        kv, first = self._runner.kv, self._spec.index + 1
        pages = kv[slots // self._block_size, first:, :, slots % self._block_size]  # [N, pages, 2, heads, dim]
        return pages.flatten(1)[:, : self._width].to(self._runner.activation_dtype)

    def _write_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        kv, first = self._runner.kv, self._spec.index + 1
        shape = (kv.shape[1] - first, 2, *kv.shape[4:])
        padded = functional.pad(states, (0, math.prod(shape) - self._width)).to(kv.dtype)
        kv[slots // self._block_size, first:, :, slots % self._block_size] = padded.view(-1, *shape)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        drafted = self._head.logits(states)
        logits = drafted.new_full((len(states), self._runner.vocab_size), -torch.inf)
        logits[:, self._token_ids] = drafted
        return logits

    def _fit(self, states: torch.Tensor) -> torch.Tensor:
        heads, dim = self._runner.kv_shape[2:]
        return fit_cache(states.transpose(0, 1)[None], heads, dim)[0].transpose(0, 1)

    def _index(self, numbers: IndexArray) -> torch.Tensor:
        return torch.as_tensor(numbers, device=self._runner.config.device).long()


def _for_inference(head: PolicyHead, runner: ModelRunner) -> PolicyHead:
    """Return the head on the policy's device, with the policy's kernels."""
    config = runner.config
    cast(head, Precision(runner.activation_dtype))
    head = head.to(config.device)
    if config.device.type != "cpu" or config.arithmetic == "torch":
        return head
    if isinstance(head, MtpHead):
        fuse_layer(head.layer, Precision(config.dtype), arithmetic=config.arithmetic)
    else:
        for module in list(head.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    packed = PackedLinear.from_linear(child, dtype=config.dtype, arithmetic=config.arithmetic)
                    setattr(module, name, packed)
    return head
