"""Sampling kernels equal their slow twins in tokens, and in bits in any batch."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from rlhfspec.kernels import gumbel
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.philox import gumbel_noise

pytestmark = pytest.mark.turns(parts=3)

INF = float("inf")
NATIVE_ISAS = [isa for isa in build.GENERAL_ISAS if build.load() is not None and build.supports(isa)]
needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason=f"no CPU kernels: {build.unavailable_reason()}")


class Batch(NamedTuple):
    logits: Tensor  # [N, V]
    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor

    def rows(self, keep: Tensor | slice) -> "Batch":
        return Batch(*(value[keep] for value in self))

    @property
    def drafting(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.logits, self.seeds, self.positions, self.temperatures


def random_batch(logits: Tensor, generator: torch.Generator, *, masked: bool = True) -> Batch:
    rows, vocab_size = logits.shape

    def choose(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]

    return Batch(
        logits,
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        torch.randint(0, 9999, (rows,), generator=generator, dtype=torch.int32),
        choose([0.0, 1e-20, 0.3, 0.7, 1.0, 1.0, 2.0, 1e20], torch.float32),
        choose([0, 0, 1, 2, 5, 50, vocab_size - 1, vocab_size, 10**6] if masked else [0], torch.int32).clamp(min=0),
        choose([1.0, 1.0, 0.95, 0.5, 0.25, 1e-6, 0.9999999] if masked else [1.0], torch.float32),
    )


def generator(*seed: object) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)  # of numbers only: strings hash differently every run


def normal(rows: int, vocab_size: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, vocab_size, generator=g) * 3


def tied(rows: int, vocab_size: int, g: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, (rows, vocab_size), generator=g).float() * 2 - 1
    return torch.randint(0, 3, (rows, vocab_size), generator=g).float() * 0.5 * signs


def holed(rows: int, vocab_size: int, g: torch.Generator) -> Tensor:
    logits = normal(rows, vocab_size, g)
    logits[torch.rand(rows, vocab_size, generator=g) < 0.3] = -INF
    logits[:, vocab_size // 2] = 1.0
    return logits


def huge(rows: int, vocab_size: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, vocab_size, generator=g) * 1e4


def rising(rows: int, vocab_size: int, g: torch.Generator) -> Tensor:
    """Return increasing logits, the worst order for a running maximum."""
    return torch.linspace(-20, 20, vocab_size).expand(rows, -1).contiguous()


SHAPES_OF_LOGITS: list[Callable[[int, int, torch.Generator], Tensor]] = [normal, tied, holed, huge, rising]


def near_ties(batch: Batch) -> Batch:
    """Return logits whose noisy scores are equal up to float32 rounding."""
    temperatures = torch.where(batch.temperatures > 0, batch.temperatures, 1).clamp(0.3, 2.0)
    noise = gumbel_noise(batch.seeds, batch.positions, batch.logits.shape[1])
    return batch._replace(logits=((5.0 - noise) * temperatures[:, None].double()).float(), temperatures=temperatures)


def native_sample(isa: str, batch: Batch) -> gumbel.SampleResult:
    return gumbel._sample_native(gumbel._native("gumbel_sample", isa), *batch)


def native_candidates(isa: str, batch: Batch, k: int) -> gumbel.Candidates:
    return gumbel._candidates_native(gumbel._native("gumbel_candidates", isa), *batch.drafting, k)


def assert_same_sample(found: gumbel.SampleResult, wanted: gumbel.SampleResult) -> None:
    """Assert equal tokens, and log-probs to 1e-6 or float32's resolution."""
    assert torch.equal(found.finite, wanted.finite)
    assert torch.equal(found.tokens, wanted.tokens)
    for one, other in ((found[1], wanted[1]), (found[2], wanted[2])):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, equal_nan=True)


def assert_same_candidates(found: gumbel.Candidates, wanted: gumbel.Candidates) -> None:
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores, wanted.scores, atol=1e-6, rtol=1e-6)


def bits(result: tuple[Tensor, ...]) -> list[list[int]]:
    return [value.view(torch.int32).tolist() if value.dtype == torch.float32 else value.tolist() for value in result]


@pytest.mark.sweep(parts=3)
@needs_native
@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("shape", SHAPES_OF_LOGITS)
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 15, 16, 33, 255, 257, 5003])
def test_native_equals_reference(vocab_size: int, shape: Callable[..., Tensor], isa: str) -> None:
    g = generator(vocab_size, SHAPES_OF_LOGITS.index(shape))
    batch = random_batch(shape(48, vocab_size, g), g)
    assert_same_sample(native_sample(isa, batch), gumbel.sample_reference(*batch))
    for k in (1, 3, 16):
        assert_same_candidates(native_candidates(isa, batch, k), gumbel.candidates_reference(*batch.drafting, k))


@needs_native
@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("vocab_size", [5, 300, 4096])
def test_native_resolves_near_ties(vocab_size: int, isa: str) -> None:
    """The scores differ in the seventh digit, where the float32 search alone fails."""
    g = generator(vocab_size, 1)
    batch = near_ties(random_batch(normal(64, vocab_size, g), g, masked=False))
    assert_same_sample(native_sample(isa, batch), gumbel.sample_reference(*batch))
    assert_same_candidates(native_candidates(isa, batch, 8), gumbel.candidates_reference(*batch.drafting, 8))


@needs_native
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_native_finds_the_nucleus_of_a_large_vocabulary(spread: float) -> None:
    g = generator(int(spread * 10))
    batch = random_batch(torch.randn(24, 40_000, generator=g) * spread, g)
    assert_same_sample(native_sample(NATIVE_ISAS[0], batch), gumbel.sample_reference(*batch))


@needs_native
@given(st.data())
def test_native_equals_reference_on_odd_rows(data: st.DataObject) -> None:
    """Rows are small, of arbitrary floats, with ties and impossible tokens."""
    value = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -INF, 88.0, -1e30, 1e30]), st.floats(-30, 30, width=32))
    row = data.draw(st.lists(value, min_size=1, max_size=40))
    T = data.draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-30, 1e30]), st.floats(2**-7, 16, width=32)))
    top_k = data.draw(st.integers(0, len(row) + 1))
    top_p = data.draw(st.one_of(st.just(1.0), st.floats(2**-20, 1, width=32)))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    batch = Batch(
        torch.tensor([row]),
        torch.tensor([seed]),
        torch.tensor([data.draw(st.integers(0, 2**31 - 1))], dtype=torch.int32),
        torch.tensor([T]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
    )
    wanted, proposals = gumbel.sample_reference(*batch), gumbel.candidates_reference(*batch.drafting, 4)
    for isa in NATIVE_ISAS:
        assert_same_sample(native_sample(isa, batch), wanted)
        assert_same_candidates(native_candidates(isa, batch, 4), proposals)


def nucleus_of(row: list[float], top_p: float) -> tuple[Batch, list[int]]:
    """Return 400 draws from one row, and the ids kept by the definition."""
    mass = list(itertools.accumulate([math.exp(x - max(row)) for x in sorted(row, reverse=True)]))
    num_kept = 1 + next(n for n, c in enumerate(mass) if c >= float(np.float32(top_p)) * mass[-1])
    ids = sorted(range(len(row)), key=lambda v: (-row[v], v))[:num_kept]
    n = 400
    zeros = torch.zeros(n, dtype=torch.int32)
    batch = Batch(torch.tensor([row] * n), torch.arange(n), zeros, torch.ones(n), zeros, torch.full((n,), top_p))
    return batch, sorted(ids)


@needs_native
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.250001])
@pytest.mark.parametrize("num_small", [0, 1000])
def test_the_nucleus_ends_exactly_at_its_boundary(top_p: float, num_small: int) -> None:
    """Eight equal tokens give exact sums; a thousand tiny ones change them only if added among themselves first."""
    batch, kept = nucleus_of([0.0] * 8 + [-39.0] * num_small, top_p)
    result = native_sample(NATIVE_ISAS[0], batch)
    assert sorted(set(result.tokens.tolist())) == kept
    assert_same_sample(result, gumbel.sample_reference(*batch))


@needs_native
def test_a_row_gives_the_same_bits_in_every_batch(threads: Callable[[int], None]) -> None:
    """Batch, stride, thread count and instruction set change no bit of tokens, log-probs and scores."""
    g = generator(5)
    batch = random_batch(torch.cat([normal(40, 3001, g), holed(20, 3001, g), tied(12, 3001, g)]), g)
    threads(1)
    sample, proposals = bits(native_sample(NATIVE_ISAS[0], batch)), bits(native_candidates(NATIVE_ISAS[0], batch, 4))
    padded = torch.full((72, 3001 + 13), torch.nan)
    padded[:, 3:3004] = batch.logits
    strided = batch._replace(logits=padded[:, 3:3004])
    for isa in NATIVE_ISAS:
        for count in (1, 2):
            threads(count)
            assert bits(native_sample(isa, strided)) == sample
            assert bits(native_candidates(isa, strided, 4)) == proposals
    for i in range(72):
        row = batch.rows(slice(i, i + 1))
        assert bits(native_sample(NATIVE_ISAS[0], row)) == [values[i : i + 1] for values in sample]
        assert bits(native_candidates(NATIVE_ISAS[0], row, 4)) == [values[i : i + 1] for values in proposals]


@needs_native
def test_log_probs_are_accurate_in_float64_terms() -> None:
    """A flat, large row and a peaked one are within float32 rounding of the exact value."""
    g = generator(8)
    logits = torch.stack([torch.randn(151_936, generator=g), torch.randn(151_936, generator=g) * 8])
    batch = random_batch(logits, g, masked=False)._replace(temperatures=torch.tensor([1.0, 0.7]))
    result = native_sample(NATIVE_ISAS[0], batch)
    exact = torch.log_softmax(logits.double(), 1).gather(1, result.tokens.long()[:, None])[:, 0]
    tempered = torch.log_softmax(logits.double() / batch.temperatures[:, None].double(), 1)
    torch.testing.assert_close(result.log_probs.double(), exact, rtol=1e-7, atol=1e-7)
    tempered = tempered.gather(1, result.tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(result.tempered_log_probs.double(), tempered, rtol=1e-7, atol=1e-7)


@needs_native
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_exponentials_are_accurate(isa: str) -> None:
    """A log-prob near 0 is about exp(-gap), so float32 shows the relative error."""
    gap = torch.linspace(0.05, 60, 2000)
    logits = torch.stack([torch.zeros(2000), -gap], dim=1)
    batch = random_batch(logits, generator(11), masked=False)._replace(temperatures=torch.zeros(2000))
    exact = -torch.log1p(torch.exp(-gap.double()))
    found = native_sample(isa, batch).log_probs.double()
    held = exact < -1e-7  # nearer to 0 float64 itself cannot hold 1 + exp(-gap) well enough
    torch.testing.assert_close(found[held], exact[held], rtol=6.5e-8, atol=0)


def triton() -> Any:
    return pytest.importorskip("rlhfspec.kernels.gumbel_triton", reason="no triton", exc_type=ImportError)


def triton_sample(batch: Batch) -> gumbel.SampleResult:
    return gumbel.SampleResult(*triton().sample(*batch))


def triton_candidates(batch: Batch, k: int) -> gumbel.Candidates:
    return gumbel.Candidates(*triton().candidates(*batch.drafting, k))


SAMPLERS: dict[str, Callable[[Batch], gumbel.SampleResult]] = {
    "public": lambda batch: gumbel.sample(*batch),
    "reference": lambda batch: gumbel.sample_reference(*batch),
    "triton": triton_sample,
}
PROPOSERS: dict[str, Callable[[Batch, int], gumbel.Candidates]] = {
    "public": lambda batch, k: gumbel.candidates(*batch.drafting, k),
    "reference": lambda batch, k: gumbel.candidates_reference(*batch.drafting, k),
    "triton": triton_candidates,
}


@pytest.mark.parametrize("which", SAMPLERS)
def test_a_row_without_an_answer_is_reported_and_harms_no_other(which: str) -> None:
    g = generator(3)
    batch = random_batch(normal(8, 40, g), g)
    good = SAMPLERS[which](batch)
    broken = batch.logits.clone()
    broken[1, 5], broken[3, 39], broken[4], broken[6, 0] = torch.nan, INF, -INF, torch.nan
    result = SAMPLERS[which](batch._replace(logits=broken))
    bad = torch.tensor([False, True, False, True, True, False, True, False])
    assert result.finite.tolist() == (~bad).tolist()
    assert result.tokens[bad].tolist() == [0] * 4
    assert result.log_probs[bad].isnan().all()
    assert result.tempered_log_probs[bad].isnan().all()
    assert bits(tuple(value[~bad] for value in result)) == bits(tuple(value[~bad] for value in good))


@pytest.mark.parametrize("which", PROPOSERS)
def test_missing_candidates_are_minus_one(which: str) -> None:
    g = generator(4)
    batch = random_batch(normal(5, 3, g), g)
    batch.logits[0] = -INF
    batch.logits[1, 0] = torch.nan
    batch.logits[2, 1] = -INF
    tokens, scores = PROPOSERS[which](batch, 5)
    assert (tokens == -1).sum(1).tolist() == [5, 5, 3, 2, 2]
    assert torch.equal(tokens == -1, scores == -INF)
    assert sorted(tokens[3].tolist()) == [-1, -1, 0, 1, 2]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of numpy, in Triton's interpreter
@pytest.mark.parametrize("which", PROPOSERS)
def test_a_score_below_float32s_least_is_no_candidates(which: str) -> None:
    zero, seed = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    row = Batch(torch.tensor([[0.0, -1e30, 0.0]]), seed, zero, torch.tensor([1e-30]), zero, torch.ones(1))
    tokens, scores = PROPOSERS[which](row, 3)
    assert (sorted(tokens[0].tolist()), scores[0, 2].item()) == ([-1, 0, 2], -INF)


@pytest.mark.parametrize("which", SAMPLERS)
def test_greedy_takes_the_lowest_id_of_the_largest_logits(which: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-0.0, 0.0, -1.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    zeros = torch.zeros(3, dtype=torch.int32)
    batch = Batch(logits, torch.arange(3), zeros, torch.zeros(3), zeros, torch.ones(3))
    result = SAMPLERS[which](batch)
    assert result.tokens.tolist() == [1, 0, 0]
    assert result.tempered_log_probs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("which", SAMPLERS)
def test_masks_treat_negative_zero_as_zero(which: str) -> None:
    n = 30
    logits, zeros, three = torch.tensor([[-0.0, 0.0] * 4] * n), torch.zeros(n, dtype=torch.int32), torch.full((n,), 3)
    batch = Batch(logits, torch.arange(n), zeros, torch.ones(n), three.to(torch.int32), torch.ones(n))
    assert set(SAMPLERS[which](batch).tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("which", PROPOSERS)
def test_of_equal_candidates_the_higher_id_goes_first(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if which == "triton":
        monkeypatch.setattr(triton(), "MAX_TILE", 16)
    row = [1.0] * 16 + [0.0] * 20 + [2.0]
    zeros = torch.zeros(1, dtype=torch.int32)
    batch = Batch(torch.tensor([row]), torch.tensor([1]), zeros, torch.zeros(1), zeros, torch.ones(1))
    assert PROPOSERS[which](batch, 3).tokens.tolist() == [[36, 0, 1]]


def test_candidates_hold_the_sampled_token_first() -> None:
    """With shared noise, a drafter with the target's logits proposes the target's token."""
    g = generator(6)
    batch = random_batch(normal(200, 500, g), g, masked=False)
    assert torch.equal(gumbel.candidates(*batch.drafting, 3).tokens[:, 0], gumbel.sample(*batch).tokens)


@pytest.mark.parametrize("native", [True, False])
def test_numpy_arrays_and_tensors_give_the_same_samples(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(gumbel, "_native", lambda name: None)
    g = generator(7)
    batch = random_batch(normal(6, 50, g), g)
    arrays = [value.numpy() for value in batch[1:]]
    arrays[0] = arrays[0].view(np.uint64)
    for array in arrays:
        array.flags.writeable = False  # a view of someone's table need not be ours to write
    assert bits(gumbel.sample(batch.logits, *arrays)) == bits(gumbel.sample(*batch))
    assert bits(gumbel.candidates(batch.logits, *arrays[:3], 2)) == bits(gumbel.candidates(*batch.drafting, 2))


def test_no_rows_give_no_results() -> None:
    batch = random_batch(torch.zeros(0, 9), generator(0))
    assert [len(value) for value in gumbel.sample(*batch)] == [0, 0, 0, 0]
    assert gumbel.candidates(*batch.drafting, 2).tokens.shape == (0, 2)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("logits", {"logits": torch.zeros(4)}),
    ("logits", {"logits": torch.zeros(2, 0)}),
    ("logits", {"logits": torch.zeros(2, 4, dtype=torch.float64)}),
    ("logits", {"logits": torch.zeros(4, 2).t()}),
    ("seeds", {"seeds": np.zeros(3, np.int64)}),
    ("seeds", {"seeds": np.zeros(2, np.int32)}),
    ("positions", {"positions": torch.zeros(2, dtype=torch.int64)}),
    ("temperatures", {"temperatures": np.zeros(2)}),
    ("temperatures", {"temperatures": np.full(2, np.nan, np.float32)}),
    ("temperatures", {"temperatures": np.full(2, -1, np.float32)}),
    ("top_k", {"top_k": np.full(2, -1, np.int32)}),
    ("top_k", {"top_k": np.zeros((2, 1), np.int32)}),
    ("top_p", {"top_p": np.zeros(2, np.float32)}),
    ("top_p", {"top_p": np.zeros(4, np.float32)[::2]}),
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("name", "change"), WRONG)
def test_a_wrong_argument_is_named(
    name: str, change: dict[str, Any], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(gumbel, "_native", lambda name: None)
    good: dict[str, Any] = {"logits": torch.zeros(2, 4), "seeds": np.zeros(2, np.int64)}
    good |= {"positions": np.zeros(2, np.int32), "temperatures": np.ones(2, np.float32)}
    good |= {"top_k": np.zeros(2, np.int32), "top_p": np.ones(2, np.float32)}
    assert gumbel.sample(**good).finite.all()
    with pytest.raises(ValueError, match=rf"^{name}: "):
        gumbel.sample(**good | change)


@pytest.mark.parametrize("k", [0, 17])
def test_k_out_of_range_is_named(k: int) -> None:
    with pytest.raises(ValueError, match=r"^k: "):
        gumbel.candidates(torch.zeros(1, 4), np.zeros(1, np.int64), np.zeros(1, np.int32), np.ones(1, np.float32), k)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("shape", SHAPES_OF_LOGITS)
@pytest.mark.parametrize("vocab_size", [1, 17, 1100])
def test_triton_equals_reference(vocab_size: int, shape: Callable[..., Tensor]) -> None:
    g = generator(vocab_size, SHAPES_OF_LOGITS.index(shape), 2)
    batch = random_batch(shape(3, vocab_size, g), g)
    assert_same_sample(triton_sample(batch), gumbel.sample_reference(*batch))
    assert_same_candidates(triton_candidates(batch, 5), gumbel.candidates_reference(*batch.drafting, 5))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [1, 17, 1100])
def test_triton_gives_a_given_token_the_bits_of_sampling_it(vocab_size: int, temperature: float) -> None:
    g = generator(vocab_size)
    batch = random_batch(4 * torch.randn(5, vocab_size, generator=g), g, masked=False)
    batch = batch._replace(temperatures=torch.full((5,), temperature))
    batch.logits[3] = torch.nan
    batch.logits[4] = -torch.inf
    drawn = triton_sample(batch)
    tempered = triton().log_probs(batch.logits, drawn.tokens, batch.temperatures)
    assert bits((tempered,)) == bits((drawn.tempered_log_probs,))
    assert bits((triton().log_probs(batch.logits, drawn.tokens, torch.ones(5)),)) == bits((drawn.log_probs,))
    others = torch.randint(vocab_size, (5,), generator=g, dtype=torch.int32)
    found = triton().log_probs(batch.logits, others, batch.temperatures)
    wanted = gumbel.token_log_probs_reference(batch.logits, others, batch.temperatures)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6, equal_nan=True)
    outside = torch.tensor([vocab_size, -1, 1 << 30, 0, 0], dtype=torch.int32)
    assert triton().log_probs(batch.logits, outside, batch.temperatures).isnan().all()


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("shape", [normal, tied, near_ties])
def test_triton_search_skips_no_tile_wrongly(shape: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton(), "MAX_TILE", 16)
    g = generator(9)
    batch = random_batch((normal if shape is near_ties else shape)(6, 300, g), g, masked=False)
    batch = near_ties(batch) if shape is near_ties else batch._replace(temperatures=torch.tensor([0, 0, 0.7, 1, 1, 2]))
    assert_same_sample(triton_sample(batch), gumbel.sample_reference(*batch))
    assert_same_candidates(triton_candidates(batch, 6), gumbel.candidates_reference(*batch.drafting, 6))


def test_a_row_gives_the_same_bits_in_every_triton_batch() -> None:
    g = generator(10)
    batch = random_batch(normal(3, 1100, g), g)
    sample, proposals = bits(triton_sample(batch)), bits(triton_candidates(batch, 3))
    for i in range(3):
        row = batch.rows(slice(i, i + 1))
        assert bits(triton_sample(row)) == [values[i : i + 1] for values in sample]
        assert bits(triton_candidates(row, 3)) == [values[i : i + 1] for values in proposals]
