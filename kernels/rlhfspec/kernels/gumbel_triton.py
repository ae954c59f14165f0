"""Triton kernels for sampling as in docs/law.md, one program per row. Call them through `gumbel.py`.

A float32 bound skips tiles that cannot win. A fixed reduction order gives a row the same bits in every batch.
"""

# Triton has no types for its decorator or for kernel arguments.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 1024
INT_MAX = tl.constexpr(2**31 - 1)
MAX_NOISE = tl.constexpr(22.9)  # G <= 33 ln 2
WAYS = tl.constexpr(8)  # thresholds tried per pass of the bisection
BOUND_SLACK = tl.constexpr(1e-3)  # above the float32 rounding of a bound


@triton.jit
def _load_tile(row, first, vocab_size, TILE: tl.constexpr):
    """Return token ids, float32 logits, mask of NaN and +inf, each [TILE]; masked and padding logits become -inf."""
    ids = first + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    bad = (x != x) | (x == float("inf"))
    x = tl.where(bad, float("-inf"), x)
    return ids, tl.where(x == 0.0, 0.0, x), bad  # -0 sorts like +0


@triton.jit
def _words(seed, position, first, TILE: tl.constexpr):
    """Return the random words [TILE] uint32 of tokens from `first` (a multiple of 4) on."""
    block = first // 4 + tl.arange(0, TILE // 4)
    r0, r1, r2, r3 = tl.philox(seed, block, block * 0 + position, block * 0, block * 0)
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))


@triton.jit
def _gumbel(words):
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def _gumbel_bound(words):
    """Return a float32 upper bound -log(u) of the Gumbel noise -log(E), because E = -log(1 - u) >= u."""
    return -tl.log((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def _tile_scores(x, seed, position, first, temperature, least, TILE: tl.constexpr):
    """Return exact scores with noise [TILE] if one may reach `least`, else -inf for all."""
    z = x.to(tl.float64) / temperature
    scores = tl.full((TILE,), float("-inf"), tl.float64)
    if tl.max(z) + MAX_NOISE >= least:
        words = _words(seed, position, first, TILE)
        bound = z + (_gumbel_bound(words) + BOUND_SLACK)  # rounded like the score, hence never below it
        if tl.max(bound) >= least:
            scores = z + _gumbel(words)
    return scores


# ---- masks: both keep a prefix of the order (logit descending, id ascending), described by its last token ------------


@triton.jit
def _keys(x):
    """Map float32 numbers to int32 keys of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _is_kept(key, ids, last_key, last_id):
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@triton.jit
def _amounts(
    row, vocab_size, lowest, last_key, last_id, maximum, temperature, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """Return the number (BY_MASS: the sum of exp((x - max) / T)) of kept tokens with keys >= each `lowest`: [WAYS]."""
    total = tl.zeros((WAYS,), tl.float64)
    for first in range(0, vocab_size, TILE):
        ids, x, _ = _load_tile(row, first, vocab_size, TILE)
        key = _keys(x)
        weight = tl.exp((x.to(tl.float64) - maximum) / temperature) if BY_MASS else tl.full((TILE,), 1.0, tl.float64)
        weight = tl.where((ids < vocab_size) & _is_kept(key, ids, last_key, last_id), weight, 0.0)
        total += tl.sum(tl.where(key[:, None] >= lowest[None, :], weight[:, None], 0.0), axis=0)  # [TILE, WAYS]
    return total


@triton.jit
def _num_ties(row, vocab_size, key, up_to_id, last_key, last_id, TILE: tl.constexpr):
    """Return the number of kept tokens with this key and an id <= up_to_id."""
    ties = tl.zeros((), tl.float64)
    for first in range(0, vocab_size, TILE):
        ids, x, _ = _load_tile(row, first, vocab_size, TILE)
        keys = _keys(x)
        found = (keys == key) & (ids <= up_to_id) & _is_kept(keys, ids, last_key, last_id)
        ties += tl.sum(found.to(tl.float64))
    return ties


@triton.jit
def _shorten(
    row, vocab_size, wanted, last_key, last_id, maximum, temperature, BY_MASS: tl.constexpr, TILE: tl.constexpr
):
    """Return the last (key, id) of the fewest best tokens whose number (or mass) reaches `wanted`."""
    low = tl.full((), -(2**31), tl.int64)  # invariant: keys >= low reach the amount, keys >= high do not
    high = _keys(maximum.to(tl.float32)).to(tl.int64) + 1
    before = tl.zeros((), tl.float64)  # the amount with keys >= high
    while high - low > 1:
        step = (high - low) * (1 + tl.arange(0, WAYS).to(tl.int64)) // (WAYS + 1)
        lowest = low + tl.maximum(step, 1)
        amounts = _amounts(row, vocab_size, lowest, last_key, last_id, maximum, temperature, BY_MASS, TILE)
        reaches = amounts >= wanted
        low = tl.maximum(low, tl.max(tl.where(reaches, lowest, low)))
        high = tl.minimum(high, tl.min(tl.where(reaches, high, lowest)))
        before = tl.maximum(before, tl.max(tl.where(reaches, 0.0, amounts)))
    key = low.to(tl.int32)
    weight = tl.full((), 1.0, tl.float64)  # of each token with that key
    if BY_MASS:
        x = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        weight = tl.exp((x.to(tl.float64) - maximum) / temperature)
    missing = tl.maximum(tl.ceil((wanted - before) / weight), 1.0)
    high_id = tl.full((), INT_MAX, tl.int32)
    if _num_ties(row, vocab_size, key, high_id, last_key, last_id, TILE) > missing:
        low_id = tl.full((), -1, tl.int32)
        high_id = tl.zeros((), tl.int32) + (vocab_size - 1)
        while high_id - low_id > 1:
            middle_id = (low_id + high_id) // 2
            if _num_ties(row, vocab_size, key, middle_id, last_key, last_id, TILE) >= missing:
                high_id = middle_id
            else:
                low_id = middle_id
    return key, tl.minimum(high_id, tl.where(key == last_key, last_id, INT_MAX))


@triton.jit
def _mask_end(row, vocab_size, temperature, top_k, top_p, TILE: tl.constexpr):
    """Return (key, id) of the worst token that top-k and top-p keep."""
    last_key = tl.full((), -(2**31), tl.int32)
    last_id = tl.full((), INT_MAX, tl.int32)
    maximum = tl.full((), float("-inf"), tl.float64)
    for first in range(0, vocab_size, TILE):
        _, x, _ = _load_tile(row, first, vocab_size, TILE)
        maximum = tl.maximum(maximum, tl.max(x).to(tl.float64))
    if maximum > float("-inf"):
        if (top_k > 0) & (top_k < vocab_size):
            last_key, last_id = _shorten(
                row, vocab_size, top_k.to(tl.float64), last_key, last_id, maximum, temperature, False, TILE
            )
        if top_p < 1:
            everything = tl.full((WAYS,), -(2**31), tl.int64)
            mass = tl.max(_amounts(row, vocab_size, everything, last_key, last_id, maximum, temperature, True, TILE))
            last_key, last_id = _shorten(
                row, vocab_size, top_p.to(tl.float64) * mass, last_key, last_id, maximum, temperature, True, TILE
            )
    return last_key, last_id


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _grown_sum(total, old_maximum, maximum, x, keep, temperature):
    """Add a tile to the sum of exp((x - maximum) / T) over kept tokens, rescaled from the old maximum."""
    rescaled = total * tl.exp((old_maximum - maximum) / temperature)
    return rescaled + tl.sum(tl.where(keep, tl.exp((x - maximum) / temperature), 0.0))


@triton.jit
def _sample_kernel(
    logits, stride, vocab_size, seeds, positions, temperatures, top_ks, top_ps,
    tokens, log_probs, tempered_log_probs, finite, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    top_k, top_p = tl.load(top_ks + index), tl.load(top_ps + index)
    temperature = tl.load(temperatures + index).to(tl.float64)
    noisy = temperature > 0
    temperature = tl.where(noisy, temperature, 1.0)
    last_key = tl.full((), -(2**31), tl.int32)
    last_id = tl.full((), INT_MAX, tl.int32)
    if (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)) & noisy:
        last_key, last_id = _mask_end(row, vocab_size, temperature, top_k, top_p, TILE)

    maximum = tl.full((), float("-inf"), tl.float64)  # of the logits so far
    total = tl.zeros((), tl.float64)  # sum of exp(x - maximum)
    kept_total = tl.zeros((), tl.float64)  # sum over kept tokens of exp((x - maximum) / T)
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.zeros((), tl.int32)
    logit = tl.zeros((), tl.float64)  # of the token
    num_bad = tl.zeros((), tl.int32)
    for first in range(0, vocab_size, TILE):
        ids, x32, bad = _load_tile(row, first, vocab_size, TILE)
        num_bad += tl.sum(bad.to(tl.int32))
        x = x32.to(tl.float64)
        keep = _is_kept(_keys(x32), ids, last_key, last_id)
        tile_maximum = tl.maximum(maximum, tl.max(x))
        if tile_maximum > float("-inf"):
            total = _grown_sum(total, maximum, tile_maximum, x, ids < vocab_size, 1.0)
            kept_total = _grown_sum(kept_total, maximum, tile_maximum, x, keep, temperature)
        maximum = tile_maximum
        scores = x
        if noisy:
            kept = tl.where(keep, x, float("-inf"))
            scores = _tile_scores(kept, seed, position, first, temperature, best, TILE)
        tile_best = tl.max(scores)
        if tile_best > best:  # ids ascend, so among equals the earlier one stays
            best = tile_best
            token = tl.min(tl.where(scores == tile_best, ids, INT_MAX))
            logit = tl.max(tl.where(ids == token, x, float("-inf")))

    is_finite = (num_bad == 0) & (maximum > float("-inf"))
    nan = float("nan")
    if maximum > float("-inf"):
        log_prob = logit - maximum - tl.log(total)
        tempered = tl.where(noisy, (logit - maximum) / temperature - tl.log(kept_total), 0.0)
        tl.store(log_probs + index, tl.where(is_finite, log_prob, nan).to(tl.float32))
        tl.store(tempered_log_probs + index, tl.where(is_finite, tempered, nan).to(tl.float32))
    else:
        tl.store(log_probs + index, nan)
        tl.store(tempered_log_probs + index, nan)
    tl.store(tokens + index, tl.where(is_finite, token, 0))
    tl.store(finite + index, is_finite.to(tl.int8))


@triton.jit
def _log_probs_kernel(logits, stride, vocab_size, tokens, temperatures, log_probs, TILE: tl.constexpr):
    """Store log-probs of given tokens, summed in the order of `_sample_kernel` for equal bits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index).to(tl.float64)
    maximum = tl.full((), float("-inf"), tl.float64)
    total = tl.zeros((), tl.float64)
    num_bad = tl.zeros((), tl.int32)
    for first in range(0, vocab_size, TILE):
        ids, x32, bad = _load_tile(row, first, vocab_size, TILE)
        num_bad += tl.sum(bad.to(tl.int32))
        x = x32.to(tl.float64)
        tile_maximum = tl.maximum(maximum, tl.max(x))
        if tile_maximum > float("-inf"):
            total = _grown_sum(total, maximum, tile_maximum, x, ids < vocab_size, temperature)
        maximum = tile_maximum
    log_prob = tl.full((), float("nan"), tl.float64)
    if (num_bad == 0) & (maximum > float("-inf")):
        token = tl.load(tokens + index)
        logit = tl.load(row + token, mask=(token >= 0) & (token < vocab_size), other=float("nan")).to(tl.float64)
        log_prob = (logit - maximum) / temperature - tl.log(total)
    tl.store(log_probs + index, log_prob.to(tl.float32))


@triton.jit
def _candidates_kernel(
    logits, stride, vocab_size, seeds, positions, temperatures, tokens, scores_out,
    NUM: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    temperature = tl.load(temperatures + index).to(tl.float64)
    noisy = temperature > 0
    temperature = tl.where(noisy, temperature, 1.0)

    slot = tl.arange(0, SLOTS)  # the best so far, unordered; slots past NUM are never the worst and never taken
    best = tl.where(slot < NUM, float("-inf"), float("inf")).to(tl.float64)
    best_id = -1 - slot  # no token yet
    worst = tl.full((), float("-inf"), tl.float64)
    maximum = tl.full((), float("-inf"), tl.float64)
    total = tl.zeros((), tl.float64)
    num_bad = tl.zeros((), tl.int32)
    for first in range(0, vocab_size, TILE):
        ids, x32, bad = _load_tile(row, first, vocab_size, TILE)
        num_bad += tl.sum(bad.to(tl.int32))
        x = x32.to(tl.float64)
        tile_maximum = tl.maximum(maximum, tl.max(x))
        if tile_maximum > float("-inf"):
            total = _grown_sum(total, maximum, tile_maximum, x, ids < vocab_size, 1.0)
        maximum = tile_maximum
        scores = x
        if noisy:
            scores = _tile_scores(x32, seed, position, first, temperature, worst, TILE)
        tile_best = tl.max(scores)
        while tile_best > worst:
            token = tl.min(tl.where(scores == tile_best, ids, INT_MAX))
            scores = tl.where(ids == token, float("-inf"), scores)
            last = tl.max(tl.where(best == worst, best_id, -INT_MAX))  # among the worst, the highest id is replaced
            replaced = (best == worst) & (best_id == last)
            best = tl.where(replaced, tile_best, best)
            best_id = tl.where(replaced, token, best_id)
            worst = tl.min(best)
            tile_best = tl.max(scores)

    usable = (num_bad == 0) & (maximum > float("-inf"))
    best = tl.where((slot < NUM) & (best_id >= 0) & usable, best, float("-inf"))
    shift = tl.zeros((), tl.float64)
    if maximum > float("-inf"):
        shift = (maximum + tl.log(total)) / temperature
    for rank in tl.static_range(NUM):
        score = tl.max(best)
        token = tl.min(tl.where(best == score, best_id, INT_MAX))
        score = (score - shift).to(tl.float32)
        tl.store(tokens + index * NUM + rank, tl.where(score > float("-inf"), token, -1))
        tl.store(scores_out + index * NUM + rank, score)
        best = tl.where(best_id == token, float("-inf"), best)


# ---- launching -------------------------------------------------------------------------------------------------------


def _tile(vocab_size: int) -> int:
    """Return a tile size that depends on the vocabulary alone, so that sums have one order."""
    return min(MAX_TILE, max(16, int(triton.next_power_of_2(vocab_size))))


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tempered_log_probs = torch.empty_like(log_probs)
    finite = torch.empty(rows, dtype=torch.int8, device=logits.device)
    parameters = (seeds, positions, temperatures, top_k, top_p)
    results = (tokens, log_probs, tempered_log_probs, finite)
    if rows:
        _sample_kernel[(rows,)](
            logits, logits.stride(0), vocab_size, *parameters, *results, TILE=_tile(vocab_size), num_warps=8
        )
    return tokens, log_probs, tempered_log_probs, finite.view(torch.bool)


def log_probs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    rows, vocab_size = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_probs_kernel[(rows,)](
            logits, logits.stride(0), vocab_size, tokens, temperatures, found, TILE=_tile(vocab_size), num_warps=8
        )
    return found


def candidates(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows, vocab_size = logits.shape
    tokens = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    scores = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    sizes = {"NUM": k, "SLOTS": int(triton.next_power_of_2(k)), "TILE": _tile(vocab_size)}
    if rows:
        _candidates_kernel[(rows,)](
            logits, logits.stride(0), vocab_size, seeds, positions, temperatures, tokens, scores, **sizes
        )
    return tokens, scores
