"""Synthetic calls of tree attention, with everything varied that must not matter."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention

needs_native = pytest.mark.skipif(build.load() is None, reason=f"no CPU kernels here: {build.unavailable_reason()}")
NEVER = 1 << 30  # fills table entries that must not be read

Options = dict[str, Any]
OPTIONS: list[Options] = [{}, {"sliding_window": 7}, {"sliding_window": 1}, {"chunk": 5}, {"chunk": 1}]
OPTIONS += [{"chunk": 16, "softcap": 2.0}, {"softcap": 1.5}, {"sinks": torch.linspace(-1.0, 3.0, 8)}]
OPTIONS += [{"sliding_window": 9, "softcap": 30.0, "sinks": torch.linspace(120.0, -1.0, 8)}]
LONG_OPTIONS: list[Options] = [  # for contexts of several splits
    *OPTIONS,
    {"sliding_window": 64},
    {"sliding_window": 100, "softcap": 3.0},
    {"chunk": 48},
    {"chunk": 90, "sinks": torch.linspace(-1.0, 3.0, 8)},
]
SPLIT_OPTIONS: list[Options] = [{"split": split, **options} for split in (64, 128) for options in LONG_OPTIONS]


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    num_heads: int = 8
    block_size: int = 16
    num_layers: int = 2


@dataclass(frozen=True)
class Sequence:
    committed: int
    parents: tuple[int, ...]  # of each new row; -1: the last committed token
    as_tree: bool  # its rows come as tree nodes (extra), else as a prefill chunk (then parents are -1, 0, 1, ...)


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv: torch.Tensor
    meta: AttentionMeta

    def run(self, kernel: Callable[..., torch.Tensor] = tree_attention, layer: int = 1, **options: Any) -> torch.Tensor:
        scale = self.query.shape[2] ** -0.5
        return kernel(self.query, self.key, self.value, self.kv, layer, self.meta, scale=scale, **options)

    def doubled(self) -> "Case":
        key, value = (x.to(self.kv.dtype).double() for x in (self.key, self.value))
        return Case(self.query.double(), key, value, self.kv.double(), self.meta)

    def row(self, i: int) -> "Case":
        """Return row i alone over the same cache. Run the whole case first, which stores its ancestors."""
        meta = AttentionMeta(
            slots=self.meta.slots[i : i + 1], table_rows=self.meta.table_rows[i : i + 1],
            context_lens=self.meta.context_lens[i : i + 1], extra=self.meta.extra[i : i + 1],
            slot_table=self.meta.slot_table,
        )  # fmt: skip
        return Case(self.query[i : i + 1], self.key[i : i + 1], self.value[i : i + 1], self.kv, meta)


def attention_spec(window: int | None = None, chunk: int | None = None) -> AttentionSpec:
    return AttentionSpec(
        index=0, num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, scale=0.3, softcap=0.0, has_sinks=False,
        window=window, chunk=chunk,
    )  # fmt: skip


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def make_case(sequences: list[Sequence], shape: Shape, *, data_seed: int = 0, place_seed: int = 0) -> Case:
    """Return a case. `data_seed` decides queries, keys and values, `place_seed` only slots; unused slots hold NaN."""
    places = np.random.default_rng(place_seed)
    lengths = [s.committed + len(s.parents) for s in sequences]
    num_blocks = -(-sum(lengths) // shape.block_size) + 2
    kv = torch.full(
        (num_blocks, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.dim), torch.nan, dtype=shape.dtype
    )
    free = places.permutation(num_blocks * shape.block_size).astype(np.int32)
    table = np.full((len(sequences) + 1, max(lengths) + 3), NEVER, np.int32)
    order = places.permutation(len(sequences) + 1)  # table rows are in no order either
    generator = torch.Generator().manual_seed(data_seed)
    slots, rows, contexts, paths = [], [], [], []
    for number, sequence in enumerate(sequences):
        mine, free = free[: lengths[number]], free[lengths[number] :]
        row = order[number]
        held = sequence.committed if sequence.as_tree else lengths[number]
        table[row, :held] = mine[:held]
        stored = (sequence.committed, shape.num_layers, 2, shape.num_kv_heads, shape.dim)
        history = torch.randn(stored, generator=generator)
        old = torch.from_numpy(mine[: sequence.committed]).long()
        kv[old // shape.block_size, :, :, old % shape.block_size] = history.to(shape.dtype)
        for node in range(len(sequence.parents)):
            slots.append(mine[sequence.committed + node])
            rows.append(row)
            contexts.append(sequence.committed if sequence.as_tree else sequence.committed + node + 1)
            path = ancestors(sequence.parents, node) if sequence.as_tree else []
            paths.append([mine[sequence.committed + step] for step in path])
    width = max((len(path) for path in paths), default=0)
    extra = np.array([path + [-1] * (width - len(path)) for path in paths], np.int32).reshape(len(slots), width)
    meta = AttentionMeta(*(np.array(x, np.int32) for x in (slots, rows, contexts)), extra, table)  # type: ignore[arg-type]
    query, key, value = (  # views as a model gives them: [1, heads, N, D] transposed
        torch.randn(heads, len(slots), shape.dim, generator=generator).transpose(0, 1)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    return Case(query, key, value, kv, meta)


@st.composite
def sequences(draw: st.DrawFn, most_rows: int = 9, longest: int = 40) -> Sequence:
    num_rows = draw(st.integers(1, most_rows))
    if draw(st.booleans()):
        return Sequence(draw(st.integers(0, longest)), chain(num_rows), as_tree=False)
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(num_rows))
    return Sequence(draw(st.integers(0, longest)), parents, as_tree=True)


shapes = st.builds(
    Shape, num_kv_heads=st.sampled_from([1, 2, 8]), dim=st.sampled_from([16, 64, 72, 128, 6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), block_size=st.sampled_from([1, 16]),
)  # fmt: skip
forests = st.lists(sequences(), min_size=1, max_size=4)
long_forests = st.lists(sequences(longest=220), min_size=1, max_size=3)
short_or_long = st.one_of(
    st.tuples(forests, st.sampled_from(OPTIONS)), st.tuples(long_forests, st.sampled_from(SPLIT_OPTIONS))
)

TREE = Sequence(21, (-1, 0, 0, 1, -1, 3, 4, 2), as_tree=True)
LONG = [
    Sequence(190, (-1, 0, 0, 1, -1, 3, 4, 2), as_tree=True),  # crosses a border in its branches
    Sequence(60, chain(9), as_tree=False),
    Sequence(0, chain(70), as_tree=False),
    Sequence(127, (-1, 0, -1), as_tree=True),
    Sequence(3, (-1,), as_tree=True),
]
MIXED = [TREE, Sequence(0, chain(5), as_tree=False), Sequence(33, (-1,), as_tree=True), Sequence(50, chain(7), False)]


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int32), right.view(torch.int32))


def with_padding(meta: AttentionMeta, count: int) -> AttentionMeta:
    zeros = np.zeros(count, np.int32)
    return AttentionMeta(
        slots=np.concatenate([meta.slots, zeros - 1]), table_rows=np.concatenate([meta.table_rows, zeros]),
        context_lens=np.concatenate([meta.context_lens, zeros]),
        extra=np.concatenate([meta.extra, np.full((count, meta.extra.shape[1]), -1, np.int32)]),
        slot_table=meta.slot_table,
    )  # fmt: skip


@functools.cache
def rows_of_dots_are_their_own() -> None:
    """Make Triton's interpreter multiply without BLAS, so that a row's bits do not depend on its place in a tile."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype, casting="unsafe", optimize=False)
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def triton_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int,
                  meta: AttentionMeta, **options: Any) -> torch.Tensor:  # fmt: skip
    """Run the kernel on the GPU if present, else interpreted. It updates the cache in place."""
    pytest.importorskip("triton", reason="triton is not installed")
    from rlhfspec.kernels import tree_attention_triton

    rows_of_dots_are_their_own()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [x.to(device) for x in (query, key, value, kv)]
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    options = {"split": SPLIT} | options
    out = tree_attention_triton.tree_attention(*on_device, layer, meta.tensors(on_device[0].device), **options)
    kv.copy_(on_device[3])
    return out.cpu()
