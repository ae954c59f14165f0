"""Linear layers, gated MLPs, norms and activations: right values, and a row's bits in any batch."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional
from twins.gated_mlp import unpacked_weight, unpacked_weights

from rlhfspec.kernels import linear as kernels
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import (
    ACTIVATIONS,
    PackedGatedMLP,
    PackedLinear,
    RowInvariantActivation,
    arithmetic_for,
    available_arithmetics,
)
from rlhfspec.kernels.norm import FusedRMSNorm, fused_rms_norm, rms_norm_twin

FP32, BF16 = torch.float32, torch.bfloat16
needs_library = pytest.mark.skipif(build.load() is None, reason=f"no kernel library: {build.unavailable_reason()}")
needs_both_isas = pytest.mark.skipif(build.load() is None or not build.supports("avx512"), reason="needs AVX2, AVX-512")
ALL = [(dtype, arithmetic) for dtype in (FP32, BF16) for arithmetic in available_arithmetics(dtype)]
NATIVE = [case for case in ALL if case[1] != "torch"]
every_native = pytest.mark.parametrize(("dtype", "arithmetic"), NATIVE)
every_arithmetic = pytest.mark.parametrize(("dtype", "arithmetic"), ALL)
# (inputs, outputs): tiny, odd, one segment, several segments with a ragged last one, many outputs
SHAPES = [(1, 1), (37, 65), (256, 128), (700, 33), (5000, 70), (64, 700)]


@pytest.fixture(autouse=True)
def _fixed_threads_and_seed() -> Iterator[None]:
    torch.manual_seed(0)
    build.set_num_threads(1)
    yield
    build.set_num_threads(None)


def make_linear(shape: tuple[int, int], dtype: torch.dtype, arithmetic: str, *, bias: bool = True) -> PackedLinear:
    return PackedLinear.from_linear(nn.Linear(*shape, bias=bias), dtype=dtype, arithmetic=arithmetic)


def make_mlp_parts(hidden: int, intermediate: int, outputs: int, *, bias: bool = False) -> list[nn.Linear]:
    shapes = [(hidden, intermediate), (hidden, intermediate), (intermediate, outputs)]
    return [nn.Linear(*shape, bias=bias) for shape in shapes]


def pack_mlp(parts: list[nn.Linear], dtype: torch.dtype, arithmetic: str, activation: str = "silu") -> PackedGatedMLP:
    gate, up, down = parts
    return PackedGatedMLP.from_linears(gate, up, down, activation=activation, dtype=dtype, arithmetic=arithmetic)


def differing_batches(layer: nn.Module, x: Tensor) -> list[str]:
    build.set_num_threads(1)
    whole = layer(x)
    num_rows, wrong = len(x), []
    for threads in (1, 2, 3):
        build.set_num_threads(threads)
        for size in (1, 2, 3, 6, 7, 16, 17, 32, 33, 48, 65, num_rows):
            for start in {0, num_rows // 2, num_rows - size}:
                rows = slice(start, start + size)
                if not torch.equal(layer(x[rows]), whole[rows]):
                    wrong.append(f"{size} rows from {start}, {threads} threads")
    return wrong


def test_fp32_weights_are_always_multiplied_by_fma() -> None:
    assert arithmetic_for(FP32) == ("torch" if build.load() is None else "fma")


@pytest.mark.parametrize(
    ("features", "vendor", "wanted"),
    [
        ({"amx"}, "GenuineIntel", ("amx", "fma", "torch")),
        ({"amx", "avx512bf16"}, "GenuineIntel", ("amx", "fma", "dpbf16", "torch")),
        ({"avx512bf16"}, "GenuineIntel", ("fma", "dpbf16", "torch")),
        ({"avx512bf16"}, "AuthenticAMD", ("dpbf16", "fma", "torch")),
        (set(), "AuthenticAMD", ("fma", "torch")),
    ],
)
@needs_library
def test_the_choice_follows_the_cpu(
    features: set[str], vendor: str, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "amx_permitted", lambda: "amx" in features)
    monkeypatch.setattr(build, "supports", lambda isa: isa in features)
    monkeypatch.setattr(build, "cpu_vendor", lambda: vendor)
    available_arithmetics.cache_clear()
    try:
        assert available_arithmetics(BF16) == wanted
        assert arithmetic_for(BF16) == wanted[0]
    finally:
        available_arithmetics.cache_clear()


def test_an_impossible_arithmetic_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"arithmetic: .*'torch'.*got 'abacus'"):
        arithmetic_for(BF16, "abacus")
    with pytest.raises(ValueError, match=r"arithmetic: .*got 'amx'"):
        arithmetic_for(FP32, "amx")
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        arithmetic_for(torch.float16)


@pytest.mark.sweep(parts=2)
@every_native
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype, arithmetic: str) -> None:
    assert differing_batches(make_linear(shape, dtype, arithmetic), torch.randn(130, shape[0])) == []


def test_the_check_of_row_invariance_detects_a_torch_layer() -> None:
    assert differing_batches(nn.Linear(700, 65).requires_grad_(False), torch.randn(130, 700))


@every_native
@pytest.mark.parametrize(("hidden", "intermediate", "bias"), [(37, 65, True), (256, 4500, False), (600, 130, True)])
def test_gated_mlps_are_layers(hidden: int, intermediate: int, bias: bool, dtype: torch.dtype, arithmetic: str) -> None:
    mlp = pack_mlp(parts := make_mlp_parts(hidden, intermediate, hidden, bias=bias), dtype, arithmetic)
    x = torch.randn(130, hidden)
    assert differing_batches(mlp, x) == []
    gate, up, down = (PackedLinear.from_linear(part, dtype=dtype, arithmetic=arithmetic) for part in parts)
    assert torch.equal(mlp(x), down(RowInvariantActivation("silu")(gate(x)) * up(x)))


@needs_library
def test_a_gated_mlp_too_wide_for_partial_sums_has_the_same_bits() -> None:
    dtype, arithmetic = BF16, arithmetic_for(BF16)
    hidden, intermediate, outputs, num_rows = 32, 4096, 2304, 256  # 16 segments x 256 x 2304 floats > 32 MB
    mlp = pack_mlp(make_mlp_parts(hidden, intermediate, outputs), dtype, arithmetic)
    x = torch.randn(num_rows, hidden)
    build.set_num_threads(2)
    assert torch.equal(mlp(x)[100:108], mlp(x[100:108]))


@needs_both_isas
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_avx2_and_avx512_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_linear((5000, 70), dtype, "fma")
    mlp = pack_mlp(make_mlp_parts(100, 333, 64, bias=True), dtype, "fma", "gelu")
    norm = FusedRMSNorm(torch.rand(100), 1e-6)
    wide, x = torch.randn(50, 5000), torch.randn(50, 100)
    results = []
    for isa in ("avx2", "avx512"):
        monkeypatch.setenv("RLHFSPEC_ISA", isa)
        kernels.native_kernel.cache_clear()
        kernels.matmul_kernel.cache_clear()
        activations = [RowInvariantActivation(name)(x * 5) for name in ACTIVATIONS]  # type: ignore[arg-type]
        results.append([layer(wide), mlp(x), norm(x), *activations])
    kernels.native_kernel.cache_clear()
    kernels.matmul_kernel.cache_clear()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@needs_library
@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(NATIVE or [(FP32, "torch")]),
    inputs=st.integers(1, 600),
    outputs=st.integers(1, 150),
    num_rows=st.integers(1, 70),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_row_has_the_same_bits_for_any_shape_and_slice_of_rows(
    case: tuple[torch.dtype, str], inputs: int, outputs: int, num_rows: int, threads: int, data: st.DataObject
) -> None:
    layer = make_linear((inputs, outputs), *case)
    x = torch.randn(num_rows, inputs)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=40)))
    whole = layer(x)
    build.set_num_threads(threads)
    assert torch.equal(layer(x[rows]), whole[rows])


def rounded(x: Tensor, arithmetic: str) -> Tensor:
    return (x.to(BF16) if arithmetic in ("amx", "dpbf16") else x).double()


@pytest.mark.sweep(parts=2)
@every_arithmetic
@pytest.mark.parametrize("shape", SHAPES)
def test_values_against_float64(shape: tuple[int, int], dtype: torch.dtype, arithmetic: str) -> None:
    linear = nn.Linear(*shape).requires_grad_(False)
    layer = PackedLinear.from_linear(linear, dtype=dtype, arithmetic=arithmetic)
    x = torch.randn(19, shape[0])
    exact_x, exact_weight = rounded(x, arithmetic), linear.weight.to(dtype).double()
    exact = functional.linear(exact_x, exact_weight, linear.bias.double())
    magnitude = functional.linear(exact_x.abs(), exact_weight.abs(), linear.bias.abs().double())
    # Each addition rounds the sum so far by at most half an ulp; sums in random order do far better than the bound.
    tolerance = 2**-23 * (2 + shape[0] ** 0.5)
    assert ((layer(x).double() - exact).abs() / magnitude).max() < tolerance


@pytest.mark.sweep(parts=2)
@every_arithmetic
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gated_mlp_values_against_float64(dtype: torch.dtype, arithmetic: str, activation: str) -> None:
    mlp = pack_mlp(parts := make_mlp_parts(100, 333, 70, bias=True), dtype, arithmetic, activation)
    x = torch.randn(19, 100)
    weights = [(part.weight.detach().to(dtype).double(), part.bias.detach().double()) for part in parts]
    gate, up = (functional.linear(rounded(x, arithmetic), *weight) for weight in weights[:2])
    hidden = kernels.activation_twin(gate, activation) * up
    exact = functional.linear(rounded(hidden, arithmetic), *weights[2])
    # A hidden value next to a rounding boundary may fall on its other side: 2^-8 of one of 333 terms.
    tolerance = 2e-6 if arithmetic in ("fma", "torch") else 1e-3
    assert (mlp(x).double() - exact).abs().max() < tolerance * exact.abs().max()


@every_arithmetic
def test_weights_come_back_as_stored_and_can_be_replaced(dtype: torch.dtype, arithmetic: str) -> None:
    layer = make_linear((70, 33), dtype, arithmetic)
    weight, bias = torch.randn(33, 70), torch.randn(33)
    before = copy.deepcopy(layer)
    old = layer(x := torch.randn(5, 70))
    layer.load_weight(weight, bias)
    assert torch.equal(unpacked_weight(layer), weight.to(dtype))
    assert not torch.equal(layer(x), old)
    assert torch.equal(before(x), old)  # a copy has its own weights
    parts = make_mlp_parts(70, 100, 33)
    for unpacked, part in zip(unpacked_weights(pack_mlp(parts, dtype, arithmetic)), parts, strict=True):
        assert torch.equal(unpacked, part.weight.to(dtype))


@every_arithmetic
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype, arithmetic: str) -> None:
    layer, mlp = make_linear((70, 33), dtype, arithmetic), pack_mlp(make_mlp_parts(70, 65, 33), dtype, arithmetic)
    x = torch.randn(20, 70)
    broken = x.clone()
    broken[3, 5], broken[17, 69] = torch.nan, torch.inf
    good = torch.tensor([row not in (3, 17) for row in range(20)])
    for module in (layer, mlp):
        out = module(broken)
        assert out[3].isnan().all()
        assert not out[17].isfinite().any()
        assert out[good].isfinite().all()
        if arithmetic != "torch":
            assert torch.equal(out[good], module(x)[good])
    assert torch.equal(layer(broken)[17].isposinf(), unpacked_weight(layer)[:, 69] > 0)


@every_arithmetic
def test_padding_never_meets_infinity(dtype: torch.dtype, arithmetic: str) -> None:
    """Sizes are padded with zeros; zero times infinity would be NaN."""
    parts = make_mlp_parts(37, 65, 33)
    for part in parts:
        part.weight.data.abs_()
    x = torch.rand(3, 37)
    x[1, 36] = torch.inf
    out = pack_mlp(parts, dtype, arithmetic)(x)
    assert out[1].isposinf().all()
    assert out[[0, 2]].isfinite().all()


def test_shapes_are_kept_and_empty_batches_are_fine() -> None:
    layer, mlp = make_linear((8, 5), BF16, "auto"), pack_mlp(make_mlp_parts(8, 24, 5), BF16, "auto")
    for module in (layer, mlp):
        assert module(torch.randn(2, 3, 8)).shape == (2, 3, 5)
        assert module(torch.randn(0, 8)).shape == (0, 5)
        column_major = torch.randn(8, 4).T
        assert torch.equal(module(column_major), module(column_major.contiguous()))


def test_wrong_input_is_refused_by_name() -> None:
    layer = make_linear((8, 5), BF16, "auto")
    with pytest.raises(ValueError, match=r"x: must be float32 \[\.\.\., 8\]"):
        layer(torch.randn(2, 9))
    with pytest.raises(ValueError, match="x: must be float32"):
        layer(torch.randn(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="gradient"):
        layer(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(ValueError, match=r"weight: must have shape \(5, 8\)"):
        layer.load_weight(torch.randn(8, 5))
    with pytest.raises(ValueError, match="activation: must be one of"):
        PackedGatedMLP(8, 8, 8, activation="swoosh")


@needs_library
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_against_float64(name: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 100_001), torch.randn(10_000)])
    ours = RowInvariantActivation(name)(x).double()  # type: ignore[arg-type]
    exact = kernels.activation_twin(x.double(), name)
    # In the negative tail of gelu, x / 2 * (1 + erf or tanh) cancels in torch, too: absolute there, relative elsewhere.
    cancelling = 1e-7 * x.double().abs() if name.startswith("gelu") else torch.tensor(1e-37)
    assert ((ours - exact).abs() <= 3e-6 * exact.abs() + cancelling).all()


@needs_library
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_are_right_for_extreme_inputs(name: str) -> None:
    ends = torch.tensor([torch.inf, torch.nan, 1e30, -1e30, 0.0, -200.0, 1e-40])
    out = RowInvariantActivation(name)(ends)  # type: ignore[arg-type]
    assert out[0].isposinf()
    assert out[1].isnan()
    assert out[2] == ends[2]
    assert (out[3:6] == 0).all()
    assert out[6] in (ends[6], ends[6] / 2)


@needs_library
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_an_activation_does_not_depend_on_where_its_element_stands(name: str) -> None:
    x = torch.randn(37 * 41)
    activation = RowInvariantActivation(name)  # type: ignore[arg-type]
    alone = torch.cat([activation(x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2):
        build.set_num_threads(threads)
        assert torch.equal(activation(x.view(37, 41)).flatten(), alone)
        assert torch.equal(activation(x.repeat(50))[-len(x) :], alone)


@pytest.mark.parametrize("width", [1, 15, 64, 257, 1000])
@pytest.mark.parametrize("add_one", [False, True])
def test_rms_norm_agrees_with_float64_and_is_row_invariant(width: int, add_one: bool) -> None:
    x, weight = torch.randn(300, width) * 3, torch.randn(width)
    ours = fused_rms_norm(x, weight, 1e-5, add_one=add_one)
    exact = rms_norm_twin(x.double(), weight.double(), 1e-5, add_one=add_one)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=1e-7)
    assert differing_batches(FusedRMSNorm(weight, 1e-5, add_one=add_one), x) == [] or build.load() is None


def test_rms_norm_keeps_nan_in_its_row_and_refuses_a_wrong_width() -> None:
    x = torch.randn(3, 20)
    x[1, 7] = torch.nan
    out = fused_rms_norm(x, torch.ones(20), 1e-6)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    if build.load() is not None:
        with pytest.raises(ValueError, match="x: must be float32"):
            fused_rms_norm(x, torch.ones(19), 1e-6)
