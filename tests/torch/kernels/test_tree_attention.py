"""Tree attention: each kernel equals the slow twin, with a row's bits independent of the rest."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    LONG,
    LONG_OPTIONS,
    MIXED,
    NEVER,
    OPTIONS,
    SPLIT_OPTIONS,
    Case,
    Options,
    Sequence,
    Shape,
    assert_same_bits,
    chain,
    forests,
    make_case,
    needs_native,
    shapes,
    short_or_long,
    triton_kernel,
    with_padding,
)
from hypothesis import given, settings, strategies as st

from rlhfspec.kernels import tree_attention as module
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention
from rlhfspec.kernels.tree_attention_twin import tree_attention_reference

MIXED_AND_LONG = [(MIXED, {}), (LONG, {"split": 64})]


@needs_native
@settings(max_examples=40)
@given(forest=forests, shape=shapes, options=st.sampled_from(OPTIONS), seed=st.integers(0, 1000))
def test_native_agrees_with_float64(forest: list[Sequence], shape: Shape, options: Options, seed: int) -> None:
    case = make_case(forest, shape, data_seed=seed)
    exact = case.doubled()
    expected = exact.run(tree_attention_reference, **options)
    assert (case.run(**options) - expected).abs().max() < 1e-6
    assert torch.equal(case.kv.double().nan_to_num(7.0), exact.kv.nan_to_num(7.0))  # what was written, and only that


@needs_native
@settings(max_examples=70)
@given(drawn=short_or_long, shape=shapes, place_seed=st.integers(1, 1000))
def test_a_row_has_its_bits_anywhere(drawn: tuple[list[Sequence], Options], shape: Shape, place_seed: int) -> None:
    forest, options = drawn
    case = make_case(forest, shape)
    together = case.run(**options)
    assert_same_bits(torch.cat([case.row(i).run(**options) for i in range(case.meta.num_rows)]), together)
    assert_same_bits(make_case(forest, shape, place_seed=place_seed).run(**options), together)


CHAINS = [*product([30], [1, 2, 3, 5, 8, 19, 40], OPTIONS)]
CHAINS += product([0, 50, 63, 64, 127], [40], [{"split": 64, **options} for options in LONG_OPTIONS])


@pytest.mark.sweep(parts=3)
@needs_native
@pytest.mark.parametrize(("committed", "num_rows", "options"), CHAINS)
def test_chain_has_the_same_bits_as_tree_and_as_prefill(committed: int, num_rows: int, options: Options) -> None:
    chunk, tree = (Sequence(committed, chain(num_rows), as_tree=as_tree) for as_tree in (False, True))
    assert_same_bits(make_case([chunk], Shape()).run(**options), make_case([tree], Shape()).run(**options))


@needs_native
@settings(max_examples=55)
@given(
    drawn=st.one_of(
        st.tuples(st.just(20), st.lists(st.integers(0, 30), min_size=2, max_size=12), st.sampled_from(OPTIONS)),
        st.tuples(st.just(150), st.lists(st.integers(0, 170), min_size=2, max_size=12), st.sampled_from(SPLIT_OPTIONS)),
    ),
    seed=st.integers(0, 99),
)
def test_a_key_counts_the_same_in_the_table_and_in_extra(drawn: tuple[int, list[int], Options], seed: int) -> None:
    """Rows of one chain have different borders between table and extras, before or behind splits."""
    committed, places, options = drawn
    chunk = Sequence(committed, chain(len(places)), as_tree=False)
    expected = make_case([chunk], Shape()).run(**options)
    case = make_case([chunk], Shape(), place_seed=seed)
    row_table = case.meta.slot_table[case.meta.table_rows[0]]
    lengths = case.meta.context_lens
    contexts = np.minimum(np.array(places, np.int32), lengths)
    extra = np.full((len(places), lengths.max()), -1, np.int32)
    for i, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        extra[i, : length - context] = row_table[context:length]
    case.meta = AttentionMeta(case.meta.slots, case.meta.table_rows, contexts, extra, case.meta.slot_table)
    assert_same_bits(case.run(**options), expected)


@needs_native
@pytest.mark.parametrize("shape", [Shape(dim=64), Shape(dim=64, dtype=torch.bfloat16), Shape(num_kv_heads=8, dim=128)])
def test_long_context_goes_through_the_cache_in_blocks(shape: Shape) -> None:
    forest = [Sequence(1100, (-1, 0, 1, 0, -1), as_tree=True), Sequence(1040, chain(70), as_tree=False)]
    case = make_case(forest, shape)
    together = case.run()
    for i in (0, 4, 5, 40, 74):
        assert_same_bits(case.row(i).run(), together[i : i + 1])
    assert (together - case.doubled().run(tree_attention_reference)).abs().max() < 1e-6


@needs_native
@pytest.mark.skipif(not (build.supports("avx2") and build.supports("avx512")), reason="this CPU lacks one of the two")
@settings(max_examples=25)
@given(forest=forests, shape=shapes, options=st.sampled_from(OPTIONS))
def test_avx2_and_avx512_give_the_same_bits(forest: list[Sequence], shape: Shape, options: Options) -> None:
    results = []
    for isa in ("avx2", "avx512"):
        kernels = module._kernels(isa)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_kernels", lambda kernels=kernels: kernels)
            results.append(make_case(forest, shape).run(**options))
    assert_same_bits(*results)


@needs_native
@pytest.mark.parametrize(("forest", "options"), MIXED_AND_LONG)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_nan_row_affects_only_rows_that_attend_to_it(poison: float, forest: list[Sequence], options: Options) -> None:
    healthy = make_case(forest, Shape()).run(**options)
    sick = make_case(forest, Shape())
    sick.key[1] = poison  # node 1 of the first tree: seen by itself and by its descendants 3 and 5
    sick.query[10] = torch.nan
    out = sick.run(**options)
    hurt = torch.zeros(len(out), dtype=torch.bool)
    hurt[[1, 3, 5, 10]] = True
    assert out[hurt].isnan().all(dim=(1, 2)).tolist() == [True] * 4
    assert_same_bits(out[~hurt], healthy[~hurt])


@pytest.mark.sweep(parts=3)
@needs_native
@pytest.mark.parametrize(("forest", "options"), MIXED_AND_LONG)
@pytest.mark.parametrize("kernel", [tree_attention, tree_attention_reference, triton_kernel])
@pytest.mark.parametrize("sinks", [None, torch.ones(8)])
def test_padding_row_writes_nothing_and_gets_zeros(
    sinks: torch.Tensor | None, kernel: Callable[..., torch.Tensor], forest: list[Sequence], options: Options
) -> None:
    case, alone = make_case(forest[:1], Shape()), make_case(forest[:1], Shape())
    plain = alone.run(kernel, sinks=sinks, **options)
    padded = [torch.cat([x, torch.full_like(x[:3], 5.0)]) for x in (case.query, case.key, case.value)]
    out = Case(*padded, case.kv, with_padding(case.meta, 3)).run(kernel, sinks=sinks, **options)
    assert torch.equal(out[-3:], torch.zeros(3, 8, 16))
    assert_same_bits(out[:-3], plain)
    assert torch.equal(case.kv.nan_to_num(7.0), alone.kv.nan_to_num(7.0))


@needs_native
def test_inputs_may_have_any_strides_and_indices_may_be_tensors() -> None:
    case = make_case(MIXED, Shape())
    expected = case.run()
    wide = torch.randn(len(expected), 8, 32)[:, :, ::2]
    wide.copy_(case.query)
    wide_table = np.full((case.meta.slot_table.shape[0], 99), NEVER, np.int32)
    wide_table[:, : case.meta.slot_table.shape[1]] = case.meta.slot_table
    arrays = (case.meta.slots, case.meta.table_rows, case.meta.context_lens, case.meta.extra)
    tensors = AttentionMeta(*(torch.as_tensor(array) for array in arrays), torch.from_numpy(wide_table)[:, :90])
    assert_same_bits(Case(wide, case.key.contiguous(), case.value, case.kv, tensors).run(), expected)


def broken(**changes: Any) -> AttentionMeta:
    good: dict[str, Any] = {
        "slots": np.array([0, 1], np.int32), "table_rows": np.zeros(2, np.int32),
        "context_lens": np.array([1, 1], np.int32), "extra": np.array([[-1], [1]], np.int32),
        "slot_table": np.zeros((1, 4), np.int32),
    }  # fmt: skip
    return AttentionMeta(**(good | changes))


@needs_native
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("slots", np.array([0, 99], np.int32)),
        ("slots", np.array([0, -2], np.int32)),
        ("table_rows", np.array([0, 1], np.int32)),
        ("context_lens", np.array([1, 5], np.int32)),
        ("context_lens", np.array([1, -1], np.int32)),
        ("extra", np.array([[-1, 0], [1, -1]], np.int32)),
        ("slot_table", np.full((1, 4), -1, np.int32)),
        ("slot_table", np.full((1, 4), 64, np.int32)),
        ("slots", np.array([0, 1], np.int64)),
        ("extra", np.array([1, 1], np.int32)),
        ("context_lens", np.array([1], np.int32)),
    ],
)
def test_impossible_indices_are_refused_by_name(name: str, bad: Any) -> None:
    kv = torch.zeros(4, 1, 2, 16, 2, 8)
    with pytest.raises(ValueError, match=rf"^({name}|meta): "):
        tree_attention(torch.zeros(2, 2, 8), *torch.zeros(2, 2, 2, 8), kv, 0, broken(**{name: bad}), scale=1.0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("query", {"query": torch.zeros(3, 2, 8)}),
        ("query", {"query": torch.zeros(2, 3, 8)}),
        ("key, value", {"key": torch.zeros(2, 1, 8)}),
        ("kv", {"kv": torch.zeros(4, 1, 2, 12, 2, 8)}),
        ("kv", {"kv": torch.zeros(8, 1, 2, 16, 2, 8)[::2]}),
        ("layer", {"layer": 1}),
        ("scale", {"scale": 0.0}),
        ("sliding_window", {"sliding_window": 0}),
        ("chunk", {"chunk": 0}),
        ("sliding_window, chunk", {"chunk": 4, "sliding_window": 4}),
        ("softcap", {"softcap": -1.0}),
        ("sinks", {"sinks": torch.zeros(3)}),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(name: str, changes: Options) -> None:
    good = {
        "query": torch.zeros(2, 2, 8), "key": torch.zeros(2, 2, 8), "value": torch.zeros(2, 2, 8),
        "kv": torch.zeros(4, 1, 2, 16, 2, 8), "layer": 0, "meta": broken(), "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{name}: "):
        tree_attention(**(good | changes))


def test_without_native_kernels_the_twin_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_case(MIXED, Shape()).doubled().run()  # float64 always goes to the twin
    monkeypatch.setattr(build, "load", lambda: None)
    case = make_case(MIXED, Shape())
    out = case.run()
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 1e-6
    assert_same_bits(torch.cat([case.row(i).run() for i in range(len(out))]), out)


TRITON_SHAPES = [Shape(dim=16), Shape(dim=24, num_kv_heads=1), Shape(dim=16, num_heads=6), Shape(dtype=torch.bfloat16)]
SMALL = [Sequence(35, (-1, 0, 0, -1), as_tree=True), Sequence(0, chain(3), as_tree=False)]


@pytest.mark.parametrize("shape", TRITON_SHAPES)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5]])
def test_triton_agrees_with_float64(shape: Shape, options: Options) -> None:
    if "sinks" in options:
        options = options | {"sinks": options["sinks"][: shape.num_heads]}
    case = make_case(SMALL, shape)
    # The interpreter truncates where hardware rounds: store only what bfloat16 holds exactly.
    case.key, case.value = case.key.to(shape.dtype).float(), case.value.to(shape.dtype).float()
    exact = case.doubled()
    expected = exact.run(tree_attention_reference, **options)
    assert (case.run(triton_kernel, **options) - expected).abs().max() < 2e-6
    assert torch.equal(case.kv.double().nan_to_num(7.0), exact.kv.nan_to_num(7.0))


def test_triton_row_has_the_same_bits_alone_as_tree_and_as_prefill() -> None:
    case = make_case([Sequence(63, chain(3), as_tree=False)], Shape())
    whole = case.run(triton_kernel)
    assert_same_bits(torch.cat([case.row(i).run(triton_kernel) for i in range(3)]), whole)
    assert_same_bits(make_case([Sequence(63, chain(3), as_tree=True)], Shape(), place_seed=3).run(triton_kernel), whole)
