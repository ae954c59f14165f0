"""A row's bits are its own in every torch function of the audit and of the guard."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhfspec.huggingface.fused.audit import ELEMENTWISE, MOVING, REDUCING, Audit, not_audited
from rlhfspec.huggingface.fused.casting import Precision
from rlhfspec.huggingface.fused.guard import _BY_PLACE, Guard

WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257)
NUM_ROWS = 37  # with the widest row more than one thread's part, were there several
Function = Callable[[Tensor], Tensor]


def aten(name: str, *others: Any, first: Any = None) -> Function:
    """Return the torch function by its dispatcher name, applied to rows and further arguments."""
    packet = getattr(torch.ops.aten, name)
    return lambda x: packet(*(() if first is None else (first,)), x, *others)


def positive(function: Function) -> Function:
    return lambda x: function(x.abs() + 0.01)


BINARY = {"add", "div", "divide", "floor_divide", "maximum", "minimum", "mul", "multiply", "remainder", "sub"}
BINARY |= {"subtract", "true_divide"}
POSITIVE = ["log", "log10", "log1p", "log2", "rsqrt", "sqrt"]
TURNED: dict[str, Function] = {  # what takes more than rows
    "addcdiv": lambda x: torch.addcdiv(x, x.sin(), x.abs() + 0.1, value=0.3),
    "addcmul": lambda x: torch.addcmul(x, x.sin(), x.cos(), value=0.3),
    "clamp": aten("clamp", -0.4, 0.7),
    "clamp_max": aten("clamp_max", 0.4),
    "clamp_min": aten("clamp_min", -0.4),
    "clip": aten("clip", -0.4, 0.7),
    "hardtanh": aten("hardtanh", -0.3, 0.3),
    "leaky_relu": aten("leaky_relu", 0.3),
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "log_sigmoid": aten("log_sigmoid"),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x)).flatten(-2),
    "prelu": lambda x: torch.prelu(x, torch.tensor([0.3])),
    "rsub": aten("rsub", 0.7),
    "threshold": aten("threshold", 0.2, -0.1),
    "amax": aten("amax", [-1], True),
    "amin": aten("amin", [-1], True),
    "cumprod": aten("cumprod", -1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-5),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "log_softmax": aten("log_softmax", -1),
    "logsumexp": aten("logsumexp", [-1], True),
    "max": lambda x: torch.max(x, -1, keepdim=True).values,
    "mean": lambda x: torch.mean(x, -1, keepdim=True),
    "min": lambda x: torch.min(x, -1, keepdim=True).values,
    "native_layer_norm": lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)[0],
    "norm": lambda x: torch.norm(x, dim=-1, keepdim=True),
    "prod": lambda x: torch.prod(x, -1, keepdim=True),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-6),
    "softmax": aten("softmax", -1),
    "std": lambda x: torch.std(x, -1, keepdim=True),
    "sum": lambda x: torch.sum(x, -1, keepdim=True),
    "var": lambda x: torch.var(x, -1, keepdim=True),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, -1, keepdim=True), -1),
    "_log_softmax": aten("_log_softmax", -1, False),
    "_softmax": aten("_softmax", -1, False),
}  # fmt: skip
ALONE = {"index_add"}  # adds rows to rows: a case of its own below


def functions() -> Iterator[tuple[str, Function]]:
    for name in sorted((ELEMENTWISE | REDUCING) - ALONE):
        if name in TURNED:
            yield name, TURNED[name]
        elif name in BINARY:
            yield name, lambda x, name=name: getattr(torch.ops.aten, name)(x, x.cos() + 2.0)
            yield f"{name} of a number", lambda x, name=name: getattr(torch, name)(x, torch.tensor(0.37))
        else:
            yield name, positive(aten(name)) if name in POSITIVE else aten(name)


def rows_of(width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, width, generator=generator) * torch.logspace(-3, 1.5, NUM_ROWS)[:, None]


def bits_are_own(function: Function, rows: Tensor) -> bool:
    together = function(rows)
    places = (0, 1, 5, NUM_ROWS - 1)
    alone = [torch.equal(function(rows[place : place + 1].clone())[0], together[place]) for place in places]
    behind = torch.equal(function(rows[3:].clone())[2], together[5])  # at another place of memory
    return all(alone) and behind


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize(("name", "function"), [pytest.param(*each, id=each[0]) for each in functions()])
def test_what_the_audit_lets_through_gives_a_row_its_own_bits(name: str, function: Function) -> None:
    with torch.inference_mode():
        for width in WIDTHS:
            if name in ("std", "var", "var_mean") and width == 1:
                continue  # one number has none
            assert bits_are_own(function, rows_of(width)), f"{name} at a width of {width}"


def test_a_function_of_the_other_rows_is_seen() -> None:
    assert not bits_are_own(lambda x: x + 1e-7 * x.mean(), rows_of(7))
    assert not bits_are_own(lambda x: x.roll(1, 0), rows_of(7))


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("terms", [1, 2, 3, 4, 8, 33])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_over_the_terms_of_a_row_are_its_own(terms: int, width: int) -> None:
    """The sums are [T, k, H].sum(1), as in mixtures of experts, and means over heads."""
    parts = torch.stack([rows_of(width, seed) for seed in range(terms)], dim=1)
    for function in (torch.sum, torch.mean, torch.amax):
        together = function(parts, dim=1)
        for place in (0, 5, NUM_ROWS - 1):
            assert torch.equal(function(parts[place : place + 1].clone(), dim=1)[0], together[place])


def test_index_add_adds_in_the_order_of_the_index() -> None:
    rows = rows_of(33)
    index = torch.arange(NUM_ROWS) % 4
    together = torch.zeros(4, 33).index_add(0, index, rows)
    own = torch.zeros(33)
    for row in rows[index == 2]:
        own = own + row
    assert torch.equal(together[2], own)


def test_the_lists_do_not_overlap() -> None:
    assert not ELEMENTWISE & REDUCING
    assert not (ELEMENTWISE | REDUCING) & MOVING


@pytest.fixture
def guard() -> Guard:
    return Guard(arithmetic="auto")


@pytest.mark.parametrize("function", _BY_PLACE, ids=lambda function: function.__name__)
def test_functions_by_place_run_on_whole_vectors(guard: Guard, function: Any) -> None:
    others = (1.7,) if "pow" in function.__name__ else ()

    def guarded(x: Tensor) -> Tensor:
        with guard:
            return function(x.abs() if others else x, *others)  # type: ignore[no-any-return]

    with torch.inference_mode():
        for width in WIDTHS:
            rows = rows_of(width)
            assert bits_are_own(guarded, rows)
            torch.testing.assert_close(guarded(rows), function(rows.abs() if others else rows, *others))


FLOAT32 = Precision(torch.float32)
WEIGHT = nn.Parameter(torch.randn(40, 300, generator=torch.Generator().manual_seed(1)), requires_grad=False)
STACK = nn.Parameter(torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(2)), requires_grad=False)
PRODUCTS: dict[str, Function] = {
    "linear": lambda x: functional.linear(x, WEIGHT),
    "linear with a bias": lambda x: functional.linear(x, WEIGHT, torch.linspace(-1, 1, 40)),
    "linear by keyword": lambda x: functional.linear(input=x, weight=WEIGHT, bias=None),
    "a slice of a weight": lambda x: functional.linear(x, WEIGHT[3:17]),
    "@": lambda x: x @ WEIGHT.T,
    "matmul": lambda x: torch.matmul(x, WEIGHT.t()),
    "mm": lambda x: x.mm(WEIGHT.T),
    "addmm": lambda x: torch.addmm(torch.linspace(-1, 1, 40), x, WEIGHT.T),
    "bmm": lambda x: torch.bmm(x.expand(2, *x.shape), STACK).transpose(0, 1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_weights_run_on_the_kernels(guard: Guard, name: str) -> None:
    product = PRODUCTS[name]
    guard.know({"weight": WEIGHT, "stack": STACK}.items(), FLOAT32)

    def guarded(x: Tensor) -> Tensor:
        with guard:
            return product(x)

    with torch.inference_mode():
        rows = rows_of(300)
        assert bits_are_own(guarded, rows)
        torch.testing.assert_close(guarded(rows), product(rows), rtol=1e-4, atol=1e-4)
        assert guard.has_multiplied(STACK if name == "bmm" else WEIGHT)


def test_a_changed_weight_is_packed_again(guard: Guard) -> None:
    weight = nn.Parameter(torch.ones(4, 8), requires_grad=False)
    guard.know({"weight": weight}.items(), FLOAT32)
    with torch.inference_mode(), guard:
        assert float(functional.linear(torch.ones(1, 8), weight)[0, 0]) == 8.0
        weight.data.mul_(2.0)
        guard.forget()
        assert float(functional.linear(torch.ones(1, 8), weight)[0, 0]) == 16.0


def test_a_product_of_what_is_no_weight_is_torchs_own(guard: Guard) -> None:
    one, other = rows_of(300), torch.randn(300, 5)
    with guard:
        assert torch.equal(one @ other, torch.matmul(one, other))


def test_small_matrices_of_a_row_are_multiplied_row_by_row(guard: Guard) -> None:
    """Each row has its own [2, 4] and [4, 4], as in hyper-connections."""
    one, other = rows_of(8).view(-1, 2, 4), rows_of(16, 1).view(-1, 4, 4)
    with torch.inference_mode(), guard:
        together = one @ other
        assert torch.equal((one[5:6] @ other[5:6])[0], together[5])
    torch.testing.assert_close(together, torch.bmm(one, other))


def test_complex_products_are_written_out(guard: Guard) -> None:
    turns = torch.polar(torch.ones(NUM_ROWS, 33), rows_of(33, 1))
    for width in (1, 3, 8, 33):
        states = torch.view_as_complex(rows_of(2 * width).view(NUM_ROWS, width, 2).contiguous())
        with torch.inference_mode(), guard:
            together = states * turns[:, :width]
            assert torch.equal((states[5:6].clone() * turns[5:6, :width])[0], together[5])
            assert torch.equal(states * 0.3, torch.complex(states.real * 0.3, states.imag * 0.3))
        torch.testing.assert_close(together, states * turns[:, :width])


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sigmoid()


def test_the_audit_names_the_module_and_the_function() -> None:
    model = nn.Sequential(nn.ReLU(), _Product())
    with torch.inference_mode(), Audit(model) as audit:
        model(torch.ones(2, 8))
        with not_audited():
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert audit.by_company == [("1", "matmul"), ("1", "sigmoid")]


def test_the_guard_makes_the_audit_content(guard: Guard) -> None:
    model = _Product()
    guard.know(model.named_parameters(), FLOAT32)
    with torch.inference_mode(), Audit(model) as audit, guard:
        model(torch.ones(2, 8))
    assert audit.by_company == []


def test_an_unknown_function_is_not_let_through() -> None:
    with torch.inference_mode(), Audit(nn.Identity()) as audit:
        torch.special.bessel_j0(torch.ones(3))
        torch.fft.fft(torch.ones(3))
        torch.ones(3) ** 1.7
        torch.ones(3) ** 2
    assert [name for _, name in audit.by_company] == ["fft_fft", "pow", "special_bessel_j0"]
