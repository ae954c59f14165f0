"""The kernel library: builds by CPU, cache, and the vector type of all kernels."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhfspec.kernels.cpu import build

needs_library = pytest.mark.skipif(build.load() is None, reason=f"no kernel library: {build.unavailable_reason()}")
needs_both_isas = pytest.mark.skipif(build.load() is None or not build.supports("avx512"), reason="needs AVX2, AVX-512")
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38]
SPECIAL += [-3.4e38, 88.7, 88.8, -87.4, -103.9, -104.1, 1e-38, 1.0]


@needs_library
def test_every_general_kernel_exists_for_every_general_isa() -> None:
    library = build.load()
    for isa in build.GENERAL_ISAS:
        for name in ("rms_norm", "activation", "linear_fp32", "linear_bf16", "gated_mlp_bf16", "probe_exp"):
            assert getattr(library, f"{name}_{isa}")


@needs_library
def test_loading_leaves_one_openmp_and_no_flush_to_zero() -> None:
    """Two OpenMP pools fight for cores, and -Ofast at link time would flush subnormals everywhere."""
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) <= 1
    assert (torch.tensor(1e-40) * 1).item() != 0


def test_forcing_an_unknown_isa_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_ISA", "sse2")
    with pytest.raises(ValueError, match="RLHFSPEC_ISA"):
        build.best_isa()


def test_the_number_of_threads_follows_torch_until_it_is_set() -> None:
    try:
        assert build.num_threads() == torch.get_num_threads()
        build.set_num_threads(3)
        assert build.num_threads() == 3
        with pytest.raises(ValueError, match="num_threads"):
            build.set_num_threads(0)
    finally:
        build.set_num_threads(None)
    assert build.num_threads() == torch.get_num_threads()


def probe(name: str, isa: str, *arrays: np.ndarray) -> None:
    count = ctypes.c_long(arrays[0].size)
    build.function(name, isa)(*[ctypes.c_void_p(array.ctypes.data) for array in arrays], count)


def general_isas() -> list[str]:
    return [isa for isa in build.GENERAL_ISAS if build.supports(isa)]


def sample() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate([rng.uniform(-110, 95, 200_000), rng.normal(size=99_984), SPECIAL]).astype(np.float32)


def exp(isa: str, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    probe("probe_exp", isa, x, out)
    return out


@needs_library
@pytest.mark.parametrize("isa", general_isas())
def test_exp_is_within_two_ulp_everywhere(isa: str) -> None:
    x = sample()
    ours = exp(isa, x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = np.exp(x.astype(np.float64))
        as_float = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(as_float))
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(as_float))
    finite = np.isfinite(as_float)
    error_in_ulp = np.abs(ours[finite] - exact[finite]) / np.spacing(as_float[finite]).astype(np.float64)
    assert error_in_ulp.max() <= 2.0


@needs_both_isas
def test_exp_and_reductions_have_the_same_bits_for_every_isa() -> None:
    x = sample()
    np.testing.assert_array_equal(exp("avx2", x).view(np.int32), exp("avx512", x).view(np.int32))
    finite = np.nan_to_num(x, nan=0.0, posinf=1e30, neginf=-1e30)
    results = []
    for isa in ("avx2", "avx512"):
        sums, largest = np.empty(x.size // 16, np.float32), np.empty(x.size // 16, np.float32)
        probe_arrays = (finite, sums, largest)
        probe("probe_reduce", isa, *probe_arrays)
        np.testing.assert_array_equal(largest, finite.reshape(-1, 16).max(1))
        results.append(sums)
    np.testing.assert_array_equal(results[0].view(np.int32), results[1].view(np.int32))


@needs_library
@pytest.mark.parametrize("isa", general_isas())
def test_bf16_is_rounded_as_torch_rounds_it(isa: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 160_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), sample()])
    vector, scalar, back = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16), np.empty_like(x)
    probe("probe_bf16", isa, x, vector, scalar, back)
    wanted = torch.from_numpy(x).to(torch.bfloat16)
    np.testing.assert_array_equal(vector, scalar)
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(vector[~is_nan], wanted.view(torch.int16).numpy().view(np.uint16)[~is_nan])
    np.testing.assert_array_equal(np.isnan(back), is_nan)
    np.testing.assert_array_equal(back[~is_nan], wanted.float().numpy()[~is_nan])


@pytest.mark.skipif(build.load() is None, reason=f"no CPU kernels: {build.unavailable_reason()}")
@pytest.mark.parametrize("name", ["attention", "decoder", "draft"])
def test_a_struct_of_another_length_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^{name}.cpp: its structs have \(\d+, \d+\) bytes"):
        build.check_sizes(name, 8, 8)
