"""Gumbel-max sampling as in docs/law.md: CPU and Triton kernels and a reference, which choose the same tokens."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.philox import gumbel_noise

MAX_CANDIDATES = 16

PerRow = Tensor | npt.NDArray[Any]  # [N], one value a row: a tensor on the logits' device, or numpy


class SampleResult(NamedTuple):
    """Sampled tokens on the logits' device. Rows that are not finite have token 0 and NaN log-probs."""

    tokens: Tensor  # [N] int32
    log_probs: Tensor  # [N] float32, under softmax(logits)
    tempered_log_probs: Tensor  # [N] float32, under the distribution sampled from (temperature, then masks)
    finite: Tensor  # [N] bool: False where the logits hold NaN or +inf, or only -inf


class Candidates(NamedTuple):
    """Drafter's best tokens by score with noise, best first. Missing ones have token -1 and score -inf."""

    tokens: Tensor  # [N, k] int32
    scores: Tensor  # [N, k] float32


def sample(
    logits: Tensor, seeds: PerRow, positions: PerRow, temperatures: PerRow, top_k: PerRow, top_p: PerRow
) -> SampleResult:
    """Sample one token per row as defined in docs/law.md.

    logits [N, V] float32; seeds [N] int64 or numpy uint64; positions [N] int32 in the response; temperatures [N]
    float32 (0: greedy); top_k [N] int32 (0: all); top_p [N] float32 in (0, 1]. Ranges are not checked on a GPU.
    """
    _check_logits(logits)
    kernel = _native("gumbel_sample") if logits.is_cpu else None
    if kernel is not None:
        return _sample_native(kernel, logits, seeds, positions, temperatures, top_k, top_p)
    rows = logits.shape[0]
    arguments = (
        _as_tensor("seeds", seeds, rows, logits.device),
        _as_tensor("positions", positions, rows, logits.device),
        _as_tensor("temperatures", temperatures, rows, logits.device),
        _as_tensor("top_k", top_k, rows, logits.device),
        _as_tensor("top_p", top_p, rows, logits.device),
    )
    if logits.is_cuda:
        from rlhfspec.kernels import gumbel_triton

        return SampleResult(*gumbel_triton.sample(logits, *arguments))
    return sample_reference(logits, *arguments)


def candidates(logits: Tensor, seeds: PerRow, positions: PerRow, temperatures: PerRow, k: int) -> Candidates:
    """Return the `k` (at most 16) best tokens per row by `log_softmax(logits) / T + noise`, without top-k or top-p."""
    _check_logits(logits)
    if not 1 <= k <= MAX_CANDIDATES:
        raise ValueError(f"k: must be from 1 to {MAX_CANDIDATES} (got {k})")
    kernel = _native("gumbel_candidates") if logits.is_cpu else None
    if kernel is not None:
        return _candidates_native(kernel, logits, seeds, positions, temperatures, k)
    rows = logits.shape[0]
    arguments = (
        _as_tensor("seeds", seeds, rows, logits.device),
        _as_tensor("positions", positions, rows, logits.device),
        _as_tensor("temperatures", temperatures, rows, logits.device),
    )
    if logits.is_cuda:
        from rlhfspec.kernels import gumbel_triton

        return Candidates(*gumbel_triton.candidates(logits, *arguments, k))
    return candidates_reference(logits, *arguments, k)


def token_log_probs(logits: Tensor, tokens: PerRow, temperature: float) -> Tensor:
    """Return each row's log-prob [N] of a given token under softmax(logits / temperature), without a gradient.

    Bits equal those of `sample` without top-k and top-p. Non-finite rows, and on a GPU invalid tokens, give NaN.
    """
    _check_logits(logits)
    if not (temperature > 0 and np.isfinite(temperature)):
        raise ValueError(f"temperature: must be finite and > 0 (got {temperature})")
    rows, vocab_size = logits.shape
    ids = _as_tensor("tokens", tokens, rows, logits.device)
    if ids.is_cpu and not bool(((ids >= 0) & (ids < vocab_size)).all()):  # on a device this check would synchronize
        raise ValueError(f"tokens: every value must be in [0, {vocab_size})")
    temperatures = torch.full((rows,), temperature, device=logits.device)
    if logits.is_cuda:
        from rlhfspec.kernels import gumbel_triton

        return gumbel_triton.log_probs(logits, ids, temperatures)
    kernel = _native("gumbel_log_probs") if logits.is_cpu else None
    if kernel is None:
        return token_log_probs_reference(logits, ids, temperatures)
    out = torch.empty(rows)
    vectors = (ids.contiguous().data_ptr(), temperatures.data_ptr(), out.data_ptr())
    kernel(logits.data_ptr(), logits.stride(0), rows, vocab_size, *vectors, build.num_threads())
    return out


def kept_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the mask [N, V] of tokens kept by top-k and top-p, for float64 logits and temperatures > 0."""
    ordered, ids = torch.sort(logits, dim=1, descending=True, stable=True)  # stable: lower id first among equals
    rank = torch.arange(logits.shape[1], device=logits.device)
    survives = rank < torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    weights = torch.exp((ordered - ordered[:, :1]) / temperatures[:, None]) * survives
    mass = weights.cumsum(dim=1)  # [N, V], in this order
    wanted = top_p.to(torch.float64)[:, None] * mass[:, -1:]
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))  # the mass of the better tokens
    kept = survives & ((before < wanted) | (top_p >= 1)[:, None])
    return torch.zeros_like(kept).scatter(1, ids, kept)


def sample_reference(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor
) -> SampleResult:
    _check_values(temperatures, top_k, top_p)
    finite = _finite_rows(logits)
    x = torch.where(finite[:, None], logits, 0).to(torch.float64)  # [N, V]; rows that are not finite become zeros
    greedy = temperatures == 0
    temperature = torch.where(greedy, 1, temperatures).to(torch.float64)
    kept = kept_tokens(x, temperature, top_k, top_p)
    scores = _perturbed(x, seeds, positions, temperatures).masked_fill(~kept & ~greedy[:, None], -torch.inf)
    ids = torch.arange(x.shape[1], device=x.device)
    tokens = torch.where(scores == scores.amax(1, keepdim=True), ids, x.shape[1]).amin(1)  # lowest id among equals
    centred = x - x.amax(1, keepdim=True)
    log_probs = torch.log_softmax(centred, dim=1).gather(1, tokens[:, None])[:, 0]
    tempered = (centred / temperature[:, None]).masked_fill(~kept, -torch.inf)
    tempered_log_probs = torch.log_softmax(tempered, dim=1).gather(1, tokens[:, None])[:, 0].masked_fill(greedy, 0)
    return SampleResult(
        torch.where(finite, tokens, 0).to(torch.int32),
        log_probs.masked_fill(~finite, torch.nan).to(torch.float32),
        tempered_log_probs.masked_fill(~finite, torch.nan).to(torch.float32),
        finite,
    )


def token_log_probs_reference(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    finite = _finite_rows(logits)
    x = torch.where(finite[:, None], logits, 0).to(torch.float64)
    centred = (x - x.amax(1, keepdim=True)) / temperatures.to(torch.float64)[:, None]
    picked = torch.log_softmax(centred, dim=1).gather(1, tokens[:, None].long())[:, 0]
    return picked.masked_fill(~finite, torch.nan).to(torch.float32)


def candidates_reference(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, k: int) -> Candidates:
    _check_values(temperatures)
    vocab_size = logits.shape[1]
    finite = _finite_rows(logits)[:, None]
    x = torch.where(finite, logits, 0).to(torch.float64)
    temperature = torch.where(temperatures == 0, 1, temperatures).to(torch.float64)[:, None]
    scores, tokens = torch.sort(_perturbed(x, seeds, positions, temperatures), dim=1, descending=True, stable=True)
    scores = (scores[:, :k] - torch.logsumexp(x, dim=1, keepdim=True) / temperature).masked_fill(~finite, -torch.inf)
    padding = (0, max(0, k - vocab_size))
    scores = torch.nn.functional.pad(scores, padding, value=-torch.inf).to(torch.float32)
    tokens = torch.nn.functional.pad(tokens[:, :k], padding).masked_fill(scores == -torch.inf, -1)
    return Candidates(tokens.to(torch.int32), scores)


def _finite_rows(logits: Tensor) -> Tensor:
    """Return a mask [N] of rows with no NaN or +inf and at least one logit above -inf."""
    best = logits.amax(dim=1)  # NaN if the row holds one
    return (best > -torch.inf) & (best < torch.inf)


def _perturbed(x: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    greedy = (temperatures == 0)[:, None]
    temperature = temperatures.to(torch.float64)[:, None]
    return torch.where(greedy, x, x / temperature + gumbel_noise(seeds, positions, x.shape[1]))


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits: must be [rows, vocabulary] (got shape {tuple(logits.shape)})")
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: must be float32 (got {logits.dtype})")
    if logits.stride(1) != 1 and logits.shape[1] != 1:
        raise ValueError(f"logits: a row must be contiguous (got strides {logits.stride()})")


def _check_values(temperatures: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None) -> None:
    if not temperatures.is_cpu:  # on a device this check would synchronize
        return
    checks = [("temperatures", torch.isfinite(temperatures) & (temperatures >= 0), "finite and >= 0")]
    if top_k is not None and top_p is not None:
        checks += [("top_k", top_k >= 0, ">= 0"), ("top_p", (top_p > 0) & (top_p <= 1), "in (0, 1]")]
    for name, holds, problem in checks:
        if not bool(holds.all()):
            raise ValueError(f"{name}: every value must be {problem}")


_TORCH_DTYPES = {
    "seeds": torch.int64,
    "positions": torch.int32,
    "temperatures": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "tokens": torch.int32,
}
_NUMPY_DTYPES = {
    "seeds": (np.dtype(np.int64), np.dtype(np.uint64)),
    "positions": (np.dtype(np.int32),),
    "temperatures": (np.dtype(np.float32),),
    "top_k": (np.dtype(np.int32),),
    "top_p": (np.dtype(np.float32),),
}


def _bad_parameter(name: str, value: PerRow, rows: int) -> ValueError:
    where = value.device if isinstance(value, Tensor) else "numpy"
    wanted = f"a contiguous {_TORCH_DTYPES[name]} vector of {rows} on the logits' device"
    return ValueError(f"{name}: must be {wanted} (got {value.dtype} {tuple(value.shape)} on {where})")


def _as_tensor(name: str, value: PerRow, rows: int, device: torch.device) -> Tensor:
    if isinstance(value, np.ndarray):
        array = value.view(np.int64) if value.dtype == np.uint64 else value
        value = torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
    if value.dtype != _TORCH_DTYPES[name] or value.shape != (rows,) or value.device != device:
        raise _bad_parameter(name, value, rows)
    return value


# Numbers of sizes (stride, rows, vocabulary, k of candidates) and of vectors that each function takes.
_ARGUMENTS = {"gumbel_sample": (3, 9), "gumbel_candidates": (4, 5), "gumbel_log_probs": (3, 3)}
_REFUSED_ARGUMENTS = {1: "temperatures: every value must be finite and >= 0", 2: "top_k: every value must be >= 0"}
_REFUSED_ARGUMENTS[3] = "top_p: every value must be in (0, 1]"


@functools.cache
def _native(name: str, isa: str | None = None) -> Any:
    kernel = build.function(name, isa)
    if kernel is None:
        return None
    num_sizes, num_vectors = _ARGUMENTS[name]
    sizes, vectors = [ctypes.c_long] * num_sizes, [ctypes.c_void_p] * num_vectors
    kernel.argtypes = [ctypes.c_void_p, *sizes, *vectors, ctypes.c_int]
    kernel.restype = ctypes.c_int
    return kernel


def _pointer(name: str, value: PerRow, rows: int) -> int:
    """Return the address of the per-row sampling parameter `name`. Raise ValueError for a wrong dtype or shape."""
    if isinstance(value, np.ndarray):
        if value.dtype in _NUMPY_DTYPES[name] and value.shape == (rows,) and value.flags.c_contiguous:
            if rows and value.flags.writeable:  # several times faster than .ctypes, which matters for one row
                return ctypes.addressof(ctypes.c_char.from_buffer(value.data))
            return value.ctypes.data
    elif value.dtype == _TORCH_DTYPES[name] and value.shape == (rows,) and value.is_cpu and value.is_contiguous():
        return value.data_ptr()
    raise _bad_parameter(name, value, rows)


def _empty(shape: int | tuple[int, int], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.empty(shape, dtype))  # quicker than torch.empty, which matters for one row


def _sample_native(
    kernel: Any, logits: Tensor, seeds: PerRow, positions: PerRow, temperatures: PerRow, top_k: PerRow, top_p: PerRow
) -> SampleResult:
    rows, vocab_size = logits.shape
    tokens, log_probs = _empty(rows, np.int32), _empty(rows, np.float32)
    tempered_log_probs, finite = _empty(rows, np.float32), _empty(rows, np.bool_)
    refused = kernel(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        _pointer("seeds", seeds, rows),
        _pointer("positions", positions, rows),
        _pointer("temperatures", temperatures, rows),
        _pointer("top_k", top_k, rows),
        _pointer("top_p", top_p, rows),
        tokens.data_ptr(),
        log_probs.data_ptr(),
        tempered_log_probs.data_ptr(),
        finite.data_ptr(),
        build.num_threads(),
    )
    if refused:
        raise ValueError(_REFUSED_ARGUMENTS[refused])
    return SampleResult(tokens, log_probs, tempered_log_probs, finite)


def _candidates_native(
    kernel: Any, logits: Tensor, seeds: PerRow, positions: PerRow, temperatures: PerRow, k: int
) -> Candidates:
    rows, vocab_size = logits.shape
    tokens, scores = _empty((rows, k), np.int32), _empty((rows, k), np.float32)
    refused = kernel(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        k,
        _pointer("seeds", seeds, rows),
        _pointer("positions", positions, rows),
        _pointer("temperatures", temperatures, rows),
        tokens.data_ptr(),
        scores.data_ptr(),
        build.num_threads(),
    )
    if refused:
        raise ValueError(_REFUSED_ARGUMENTS[refused])
    return Candidates(tokens, scores)
