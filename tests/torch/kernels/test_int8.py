"""Layers in 8 bits: the nearest whole numbers, exactly their products, the same bits in any batch."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from twins.gated_mlp import unpacked_weight
from twins.int8 import activations, quantised, unpacked

from rlhfspec.kernels import int8, linear as kernels
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.cpu.packing import empty_packed, pack
from rlhfspec.kernels.int8 import in_8_bits, requantise
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear, RowInvariantActivation

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.skipif(build.load() is None, reason=f"no kernel library: {build.unavailable_reason()}")
every_shape = pytest.mark.parametrize("shape", [(1, 1), (37, 65), (256, 128), (700, 33), (5000, 70)])


ARITHMETICS = ["int8", "vnni"] if build.supports("avx512vnni") else ["int8"]


@pytest.fixture(autouse=True, params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    torch.manual_seed(0)
    monkeypatch.setattr(int8, "arithmetic", lambda: request.param)
    return request.param


def packed(shape: tuple[int, int], dtype: torch.dtype = FP32) -> PackedLinear:
    return PackedLinear.from_linear(nn.Linear(*shape), dtype=dtype, arithmetic="fma")


def weight_of(layer: PackedLinear) -> Tensor:
    return unpacked_weight(layer).float()


@every_shape
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_weights_become_the_nearest_whole_numbers(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = packed(shape, dtype)
    assert torch.equal(unpacked(in_8_bits(layer)), quantised(weight_of(layer)))


def test_a_normal_weight_loses_little() -> None:
    weight = torch.randn(256, 512)
    assert (quantised(weight) - weight).square().sum() < 5e-5 * weight.square().sum()


@every_shape
def test_a_row_has_the_exact_products_of_the_8_bit_weights(shape: tuple[int, int]) -> None:
    layer = in_8_bits(packed(shape))
    x = torch.randn(130, shape[0])
    exact = functional.linear(activations(layer, x).double(), unpacked(layer).double(), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 13), slice(7, 16), slice(10, 27), slice(0, 130)):
        assert torch.equal(layer(x[rows]), layer(x)[rows])


def test_a_gated_mlp_in_8_bits_equals_its_three_layers() -> None:
    parts = [nn.Linear(*shape) for shape in ((96, 9000), (96, 9000), (9000, 70))]  # hidden columns in many blocks
    mlp = PackedGatedMLP.from_linears(*parts, activation="silu", dtype=FP32, arithmetic="fma")
    before, x = copy.deepcopy(mlp), torch.randn(21, 96)
    gate, up, down = (in_8_bits(PackedLinear.from_linear(part, dtype=FP32, arithmetic="fma")) for part in parts)
    assert torch.equal(in_8_bits(mlp)(x), down(RowInvariantActivation("silu")(gate(x)) * up(x)))
    assert torch.equal(mlp(x), before(x)), "the layer itself is as it was"


def test_every_layout_of_a_weight_gives_the_same_numbers() -> None:
    plain = packed((100, 70), BF16)
    tiles = copy.copy(plain)
    tiles.packed, tiles.arithmetic = empty_packed(70, 100, "amx", BF16), "amx"
    pack(weight_of(plain), tiles.packed, "amx")
    assert torch.equal(in_8_bits(tiles).packed, in_8_bits(plain).packed)


def test_a_copy_follows_new_weights() -> None:
    layer, other = packed((100, 70)), packed((100, 70))
    copied = in_8_bits(layer)
    layer.load_weight(weight_of(other), other.bias)
    requantise(copied, layer)
    x = torch.randn(3, 100)
    assert torch.equal(copied(x), in_8_bits(other)(x))


@pytest.mark.parametrize("arithmetic", ["int8"], indirect=True)
@pytest.mark.skipif(not build.supports("avx512"), reason="compares AVX2 with AVX-512; this CPU has not both")
def test_avx2_and_avx512_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = in_8_bits(packed((300, 70))), torch.randn(40, 300)
    results = []
    for isa in ("avx2", "avx512"):
        monkeypatch.setenv("RLHFSPEC_ISA", isa)
        for cached in (kernels.native_kernel, kernels.matmul_kernel):
            cached.cache_clear()
        results.append([layer(x[:rows]) for rows in (1, 2, 5, 40)])
    for cached in (kernels.native_kernel, kernels.matmul_kernel):
        cached.cache_clear()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
