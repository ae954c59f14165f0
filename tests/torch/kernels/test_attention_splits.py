"""Splits of attention have the same bits anywhere, and up to one split those of one softmax."""

import hashlib
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import (
    LONG,
    LONG_OPTIONS,
    Case,
    Options,
    Sequence,
    Shape,
    assert_same_bits,
    chain,
    long_forests,
    make_case,
    needs_native,
    shapes,
    triton_kernel,
)
from hypothesis import given, settings, strategies as st

from rlhfspec.kernels import tree_attention as module
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.tree_attention import AttentionMeta
from rlhfspec.kernels.tree_attention_twin import tree_attention_reference

pytestmark = pytest.mark.turns(parts=3)

UNSPLIT = 1 << 20  # longer than any context here
ISAS = [isa for isa in build.GENERAL_ISAS if build.supports(isa)]


@pytest.fixture
def every_isa(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that selects the instruction set of attention."""
    kernels = module._kernels

    def choose(isa: str) -> None:
        attention = kernels(isa)
        monkeypatch.setattr(module, "_kernels", lambda: attention)

    return choose


@needs_native
@settings(max_examples=40)
@given(forest=long_forests, shape=shapes, options=st.sampled_from(LONG_OPTIONS), seed=st.integers(0, 1000))
def test_merged_splits_equal_a_full_softmax(forest: list[Sequence], shape: Shape, options: Options, seed: int) -> None:
    case = make_case(forest, shape, data_seed=seed)
    exact = case.doubled()
    expected = exact.run(tree_attention_reference, split=UNSPLIT, **options)
    assert (exact.run(tree_attention_reference, split=64, **options) - expected).abs().max() < 1e-12
    assert (case.run(split=64, **options) - expected).abs().max() < 1e-6


@needs_native
def test_splits_change_only_bits_of_contexts_longer_than_one_split() -> None:
    """This proves that the comparisons above can fail, and that one split is one softmax."""
    case = make_case(LONG, Shape())
    split, unsplit = case.run(split=64), case.run(split=UNSPLIT)
    is_long = torch.from_numpy(case.meta.context_lens + (case.meta.extra >= 0).sum(1) > 64)
    assert (split != unsplit).any(dim=2).any(dim=1)[is_long].float().mean() > 0.9
    assert_same_bits(split[~is_long], unsplit[~is_long])
    window = {"sliding_window": 20}  # in which most rows see no border of a split
    ends = torch.from_numpy(case.meta.context_lens + (case.meta.extra >= 0).sum(1))
    crosses = ((ends - 1) // 64 != (ends - 20).clamp(0) // 64).numpy()
    assert 0 < crosses.sum() < len(crosses)
    split, unsplit = case.run(split=64, **window), case.run(split=UNSPLIT, **window)
    assert_same_bits(split[~crosses], unsplit[~crosses])
    assert not torch.equal(split, unsplit)


COMPARED = list(product((64, 256, 1024, SPLIT), (700, 4200, 9000), (1, 7, 33), (torch.float32, torch.bfloat16)))


@pytest.mark.sweep(parts=3)
@needs_native
@pytest.mark.parametrize(("split", "committed", "rows", "dtype"), COMPARED)
def test_no_bit_of_a_long_context_depends_on_where_it_is_computed(
    split: int, committed: int, rows: int, dtype: torch.dtype, every_isa: Callable[[str], None],
    threads: Callable[[int], None],
) -> None:  # fmt: skip
    """72 contexts vary rows, slots, threads and instruction sets in hundreds of comparisons."""
    forest = [Sequence(committed, chain(rows), as_tree=bool(rows % 2)), Sequence(200, chain(20), as_tree=False)]

    def case(place_seed: int = 0) -> Case:
        return make_case(forest, Shape(dtype=dtype, num_heads=4), place_seed=place_seed)

    whole = case()
    expected = whole.run(split=split)
    for row in {0, rows - 1, rows}:
        assert_same_bits(whole.row(row).run(split=split), expected[row : row + 1])
    threads(3)
    assert_same_bits(case(place_seed=5).run(split=split), expected)
    for isa in ISAS:
        every_isa(isa)
        assert_same_bits(case().run(split=split), expected)


@needs_native
def test_a_split_of_another_length_is_refused() -> None:
    for split in (0, 32, 100):
        with pytest.raises(ValueError, match=r"^split: must be a multiple of 64"):
            make_case(LONG, Shape()).run(split=split)


RECORDED = {  # options, and what was recorded in float32 and in bfloat16
    "plain": ({}, "8961fd426fa1a339", "16da86bd57290c98"),
    "window": ({"sliding_window": 1000}, "4f1bfadb1077e8e6", "58bc09f40a58efb7"),
    "chunk": ({"chunk": 1500}, "e50b5b1fa2b4e4ab", "613f392afebcb82e"),
    "capped": ({"softcap": 3.0}, "f83b35fa957159c3", "e286c53c4ac650d2"),
    "sinks": ({"sinks": torch.linspace(-1.0, 3.0, 6)}, "8bfe9ec378aa9f03", "0291fd904910fbb1"),
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Return multiples of 1/8192 in [-4, 4), the same on every machine and version."""
    places = np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 40503)
    mixed = (places ^ (places >> np.uint64(13))) * np.uint64(2246822519)
    return torch.from_numpy(((mixed >> np.uint64(8)) % np.uint64(65536)).astype(np.float32) / 8192 - 4).reshape(shape)


def recorded_case(dtype: torch.dtype) -> Case:
    """Return a chunk at the end of SPLIT positions, with heads of 72."""
    rows, slots = 5, np.arange(SPLIT, dtype=np.int32)
    last = slots[-rows:]
    meta = AttentionMeta(last, np.zeros(rows, np.int32), last + np.int32(1), np.empty((rows, 0), np.int32), slots[None])
    kv = numbers(SPLIT // 16, 1, 2, 16, 2, 72, seed=1).to(dtype)
    query, key, value = (numbers(rows, heads, 72, seed=seed) for heads, seed in ((6, 2), (2, 3), (2, 4)))
    return Case(query / 4, key, value, kv, meta)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECORDED)
def test_one_split_has_the_bits_of_a_kernel_without_splits(
    name: str, dtype: torch.dtype, isa: str, every_isa: Callable[[str], None]
) -> None:
    """The expected bits were recorded with a kernel that takes one softmax over all positions."""
    every_isa(isa)
    options, *recorded = RECORDED[name]
    out = recorded_case(dtype).run(layer=0, **options)
    assert hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16] == recorded[dtype == torch.bfloat16]


TRITON = [Sequence(145, (-1, 0, 0, 1), as_tree=True), Sequence(66, chain(2), as_tree=False), Sequence(9, (-1,), True)]
TRITON_OPTIONS = [
    {},
    {"sliding_window": 70, "softcap": 30.0, "sinks": torch.linspace(120.0, -1.0, 8)},
    {"sliding_window": 15},  # nothing is seen of the first two splits
    {"chunk": 90},
]


@pytest.mark.sweep(parts=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", TRITON_OPTIONS)
def test_triton_agrees_with_the_other_kernels(options: Options, dtype: torch.dtype) -> None:
    case = make_case(TRITON, Shape(dtype=dtype))
    case.key, case.value = case.key.to(dtype).float(), case.value.to(dtype).float()  # the interpreter truncates
    exact = case.doubled()
    expected = exact.run(tree_attention_reference, split=UNSPLIT, **options)
    found = case.run(triton_kernel, split=64, **options)
    assert (found - expected).abs().max() < 2e-6
    assert torch.equal(case.kv.double().nan_to_num(7.0), exact.kv.nan_to_num(7.0))
    if build.load() is not None:
        assert (found - case.run(split=64, **options)).abs().max() < 2e-6


@pytest.mark.sweep(parts=8)
@pytest.mark.parametrize("options", TRITON_OPTIONS)
def test_triton_gives_a_row_the_same_bits_alone_and_wherever(options: Options) -> None:
    together = make_case(TRITON, Shape()).run(triton_kernel, split=64, **options)
    case = make_case(TRITON, Shape(), place_seed=3)
    assert_same_bits(case.run(triton_kernel, split=64, **options), together)
    alone = torch.cat([case.row(i).run(triton_kernel, split=64, **options) for i in range(len(together))])
    assert_same_bits(alone, together)


def test_triton_merges_as_many_rows_at_a_time_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    together = make_case(TRITON, Shape()).run(triton_kernel, split=64)
    from rlhfspec.kernels import tree_attention_triton

    monkeypatch.setattr(tree_attention_triton, "MOST_PARTIAL_BYTES", 3 * 8 * 3 * 18 * 4)  # three rows
    assert_same_bits(make_case(TRITON, Shape()).run(triton_kernel, split=64), together)


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("options", TRITON_OPTIONS)
def test_triton_gives_short_contexts_the_bits_of_one_softmax(options: Options) -> None:
    """The slot table may have room for more splits, which merge as nothing."""
    short = [Sequence(50, (-1, 0), as_tree=True), Sequence(0, chain(3), as_tree=False)]
    expected = make_case(short, Shape()).run(triton_kernel, split=128, **options)
    wide = make_case(short, Shape())
    table = np.pad(wide.meta.slot_table, ((0, 0), (0, 200)))
    wide.meta = AttentionMeta(wide.meta.slots, wide.meta.table_rows, wide.meta.context_lens, wide.meta.extra, table)
    assert_same_bits(wide.run(triton_kernel, split=64, **options), expected)
