"""Layers of 4 and 8 bits on a device: the nearest numbers, exactly their products, reproducible sums."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfspec.kernels import few_bit_linear
from rlhfspec.kernels.few_bit_linear import BLOCK, FewBitLinear, product_reference, quantise_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU runs Triton's interpreter
both = pytest.mark.parametrize("bits", [4, 8])


@functools.cache
def triton() -> Any:
    return pytest.importorskip("rlhfspec.kernels.few_bit_linear_triton", reason="no triton", exc_type=ImportError)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _dots_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as whole numbers, and multiplies those."""
    triton()
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        one, other = ((each.data.astype(np.uint32) << 16).view(np.float32) for each in (a, b))
        return TensorHandle(np.matmul(one, other) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def weights(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.randn(num_outputs, num_inputs)
    weight[0, :BLOCK] = 0.0
    weight[-1, 0] = 30.0  # beside it the others of its group vanish
    return weight.to(dtype)


def oracle(weight: Tensor, bits: int) -> Tensor:
    """Return the weight as few bits keep it, number by number, in float64."""
    size, levels = BLOCK // 2, 2 ** (bits - 1)
    kept = torch.zeros(weight.shape, dtype=torch.float64)
    for output, row in enumerate(weight.double().tolist()):
        for first in range(0, len(row), size):
            group = row[first : first + size]
            scale = torch.tensor(-max(group, key=abs) / levels).to(torch.bfloat16).item()
            for place, value in enumerate(group):
                number = 0 if scale == 0 else min(range(-levels, levels), key=lambda n: abs(n * scale - value))
                kept[output, first + place] = number * scale
    return kept


def unpacked(numbers: Tensor, scales: Tensor) -> Tensor:
    return product_reference(torch.eye(len(numbers) * BLOCK), numbers, scales, None).T.double()


def quantised_by_triton(weight: Tensor, bits: int) -> FewBitLinear:
    layer = FewBitLinear(torch.zeros_like(weight, device=DEVICE), None, bits)
    triton().quantise(weight.to(DEVICE), layer.numbers, layer.scales)
    return layer


@both
@pytest.mark.parametrize("shape", [(1, 64), (5, 192)])
def test_weights_become_the_nearest_numbers(shape: tuple[int, int], bits: int) -> None:
    weight = weights(*shape, torch.float32)  # without ties
    assert torch.equal(unpacked(*quantise_reference(weight, bits)), oracle(weight, bits))


@pytest.mark.parametrize(("bits", "most"), [(4, 8e-3), (8, 4e-5)])
def test_a_normal_weight_loses_little(bits: int, most: float) -> None:
    weight = torch.randn(64, 512)
    lost = unpacked(*quantise_reference(weight, bits)) - weight
    assert lost.square().sum() < most * weight.square().sum()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_triton_makes_the_same_numbers(bits: int, dtype: torch.dtype, is_transposed: bool) -> None:
    weight = weights(150, 128, dtype)
    given = weight.T.contiguous().T if is_transposed else weight
    layer, (numbers, scales) = quantised_by_triton(given, bits), quantise_reference(weight, bits)
    assert torch.equal(layer.numbers.cpu(), numbers)
    assert torch.equal(layer.scales.cpu(), scales)


@pytest.mark.parametrize("kind", ["BFLOAT16", "FLOAT16"])
def test_the_assembly_for_a_gpu_unpacks_every_word(kind: str) -> None:
    """No interpreter runs it, so its instructions are played here, on both halves of the registers."""
    words = np.arange(1 << 16, dtype=np.uint32)
    scales = [1.0, -0.5]
    wanted = [[((word >> shift & 15) ^ 8) - 8 for word in words.tolist()] for shift in (0, 4, 8, 12)]
    for place in (0, 16):
        found = played(getattr(triton(), f"UNPACK_{kind}"), words << place, scales, place, kind)
        for number, values in enumerate(found):
            assert values.tolist() == [each * scales[number // 2] for each in wanted[number]]


def played(assembly: str, words: Any, scales: list[float], place: int, kind: str) -> list[Any]:
    """Return the floats of `kind` in the half at bit `place` of the results."""

    def floats(bits: Any) -> Any:
        half = np.atleast_1d(bits >> place & 0xFFFF).astype(np.uint16)
        return torch.from_numpy(half.view(np.int16)).view(getattr(torch, kind.lower())).double().numpy()

    def bits(values: Any) -> Any:
        halves = torch.as_tensor(values).to(getattr(torch, kind.lower()))
        assert np.array_equal(halves.double().numpy(), values), "without rounding"
        return (halves.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)) << place

    held: dict[str, Any] = {"$4": words, "$5": bits(np.array(scales[:1])), "$6": bits(np.array(scales[1:]))}
    for line in assembly.strip("{}\n").split(";\n"):
        name, *operands = line.strip(";\n").replace(",", "").split()
        target, given = operands[0], [held[each] if each in held else operand(each) for each in operands[1:]]
        match name.split("."):
            case ["", "reg", *_]:
                continue
            case ["mov", _]:
                held[target] = given[0]
            case ["shr", _]:
                held[target] = given[0] >> given[1]
            case ["lop3", _]:
                assert given[3] == (0xF0 & 0xCC) ^ 0xAA, "(a & b) ^ c"
                held[target] = (given[0] & given[1]) ^ given[2]
            case ["fma", "rn", _]:
                one, other, added = map(floats, given)
                held[target] = bits(one * other + added)
            case _:
                raise AssertionError(line)
    return [floats(held[f"${number}"]) for number in range(4)]


def operand(text: str) -> Any:
    return np.uint32(int(text, 0)) if text[:1].isdigit() else None


@both
@pytest.mark.parametrize("num_rows", [0, 1, 5, 33, 70])
def test_triton_has_the_exact_products_of_the_numbers(bits: int, num_rows: int) -> None:
    check_products(num_rows, 150, 192, bits, torch.float16, 2e-3)


@both
@pytest.mark.usefixtures("_dots_of_bfloat16")
def test_triton_multiplies_in_bfloat16(bits: int) -> None:
    check_products(3, 40, 128, bits, torch.bfloat16, 2e-2)
    check_products(3, 40, 128, bits, torch.float32, 2e-2)


@both
def test_programs_that_share_outputs_add_up_in_order(bits: int) -> None:
    assert triton().parts_of(2, 640 // BLOCK, few_bit_linear._COUNTERS) == 2
    layer = check_products(3, 150, 640, bits, torch.float16, 2e-3)
    x = torch.randn(3, 640, dtype=torch.float16, device=DEVICE)
    first, again = (triton().product(x, layer.numbers, layer.scales, None, layer.arrived) for _ in range(2))
    assert torch.equal(first, again)


def check_products(
    num_rows: int, num_outputs: int, num_inputs: int, bits: int, dtype: torch.dtype, tolerance: float
) -> FewBitLinear:
    layer = quantised_by_triton(weights(num_outputs, num_inputs), bits)
    x, bias = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    exact = x.double() @ unpacked(layer.numbers.cpu(), layer.scales.cpu()).T
    for added in (None, bias):
        given = None if added is None else added.to(DEVICE)
        found = triton().product(x.to(DEVICE), layer.numbers, layer.scales, given, layer.arrived)
        assert found.dtype == dtype
        expected = exact if added is None else exact + added.double()
        torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance * 10)
        assert not layer.arrived.any(), "ready for the next call"
    return layer


@both
def test_a_layer_follows_new_weights_where_they_lie(bits: int) -> None:
    first, other, x = weights(6, 128), weights(6, 128), torch.randn(2, 3, 128)
    layer = FewBitLinear(first, torch.ones(6), bits)
    places = layer.numbers.data_ptr(), layer.scales.data_ptr()
    before = layer(x)
    layer.quantise(other)
    assert (layer.numbers.data_ptr(), layer.scales.data_ptr()) == places
    assert torch.equal(layer(x), FewBitLinear(other, torch.ones(6), bits)(x))
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize(("bits", "per_value"), [(4, 4.5), (8, 8.5)])
def test_the_size_of_a_layer_is_known_before(bits: int, per_value: float) -> None:
    weight = weights(6, 128)
    layer = FewBitLinear(weight, None, bits)
    assert few_bit_linear.num_bytes(weight, bits) == layer.numbers.nbytes + layer.scales.nbytes
    assert few_bit_linear.num_bytes(weight, bits) * 8 == per_value * weight.numel()
    assert few_bit_linear.fits(weight)
    assert not few_bit_linear.fits(torch.empty(6, 96))
