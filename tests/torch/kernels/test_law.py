"""The law of docs/law.md in pure Python, against its vectors and the kernels. As a script it rewrites the vectors:
PYTHONPATH=tests python tests/torch/kernels/test_law.py
"""

import json
import math
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT

from rlhfspec.kernels import gumbel, philox

VECTORS = ROOT / "docs" / "law_vectors.json"


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def noise(seed: int, t: int, v: int) -> float:
    r = philox_words([v // 4, t, 0, 0], [seed % 2**32, seed // 2**32])[v % 4]
    return -math.log(-math.log1p(-(r + 0.5) / 2**32))


def kept_ids(x: list[float], T: float, top_k: int, top_p: float) -> list[int]:
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if T == 0:
        return order
    order = order[: top_k if top_k > 0 else None]
    if top_p >= 1:
        return order
    mass, total = [], 0.0
    for v in order:
        total += math.exp((x[v] - x[order[0]]) / T)
        mass.append(total)
    return order[: 1 + next(n for n, c in enumerate(mass) if c >= top_p * total)]


def draw(x: list[float], seed: int, t: int, T: float, top_k: int, top_p: float) -> tuple[int, float, float]:
    """Return token, log_prob, tempered_log_prob."""
    kept = kept_ids(x, T, top_k, top_p)
    token = min(kept, key=lambda v: (-(x[v] / T + noise(seed, t, v) if T > 0 else x[v]), v))
    best = max(x)
    log_prob = x[token] - best - math.log(sum(math.exp(y - best) for y in x))
    if T == 0:
        return token, log_prob, 0.0
    return token, log_prob, (x[token] - best) / T - math.log(sum(math.exp((x[v] - best) / T) for v in kept))


def proposals(y: list[float], seed: int, t: int, T: float, k: int) -> list[tuple[int, float]]:
    score = [z / T + noise(seed, t, v) if T > 0 else z for v, z in enumerate(y)]
    normaliser = max(y) + math.log(sum(math.exp(z - max(y)) for z in y))
    order = sorted((v for v in range(len(y)) if y[v] > -math.inf), key=lambda v: (-score[v], v))
    return [(v, score[v] - normaliser / (T or 1)) for v in order[:k]]


def f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


PUBLISHED_PHILOX = [  # counter, key, words of the authors' own known-answer file (Random123, kat_vectors)
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PARAMETERS = [  # T, top_k, top_p
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (0.0, 0, 1.0),
    (1.0, 1, 1.0),
    (1.3, 3, 1.0),
    (1.0, 0, 0.5),
    (0.6, 0, 0.95),
    (0.9, 5, 0.8),
    (0.0, 2, 0.3),
    (5.0, 0, 0.999),
]


def _rows(generator: random.Random) -> list[list[float]]:
    gaussian = [[f32(generator.gauss(0, 2)) for _ in range(size)] for size in (2, 7, 12, 33)]
    ties = [1.0, 2.0, 2.0, -0.5, 2.0, 1.0, 2.0, 0.0]
    holes = [-math.inf, 1.5, -math.inf, 0.25, -3.0, 1.5]
    return [[0.5], *gaussian, ties, holes, [10000.0, 9999.0, -10000.0, 9999.5]]


def _text(values: list[float]) -> list[Any]:
    return [value if math.isfinite(value) else "-inf" for value in values]  # JSON has no infinity


def make_vectors() -> dict[str, Any]:
    generator = random.Random(2512)
    seeds = [0, 1, 7, 2**32 + 5, 2**63, 2**64 - 1]
    hexadecimal = [dict(zip(("counter", "key", "words"), entry, strict=True)) for entry in PUBLISHED_PHILOX]
    places = [(seed, t, v) for seed in seeds for t, v in ((0, 0), (1, 3), (4095, 151935), (2**31 - 1, 6))]
    noises: list[dict[str, Any]] = []
    for seed, t, v in places:
        word = philox_words([v // 4, t, 0, 0], [seed % 2**32, seed // 2**32])[v % 4]
        noises.append({"seed": seed, "t": t, "v": v, "word": word, "gumbel": noise(seed, t, v)})
    sampling, candidates = [], []
    for x in _rows(generator):
        for T, top_k, top_p in PARAMETERS:
            seed, t = generator.choice(seeds), generator.randrange(5000)
            case = {"logits": _text(x), "seed": seed, "t": t, "temperature": T}
            token, log_prob, tempered = draw(x, seed, t, f32(T), top_k, f32(top_p))
            masks = {"top_k": top_k, "top_p": top_p, "kept": sorted(kept_ids(x, f32(T), top_k, f32(top_p)))}
            sampling.append(case | masks | {"token": token, "log_prob": log_prob, "tempered_log_prob": tempered})
            if top_k == 0 and top_p == 1.0:
                best = proposals(x, seed, t, f32(T), 4)
                candidates.append(case | {"k": 4, "tokens": [v for v, _ in best], "scores": [s for _, s in best]})
    return {"philox": hexadecimal, "noise": noises, "sampling": sampling, "candidates": candidates}


def _dump(vectors: dict[str, Any]) -> str:
    sections = (f'"{n}": [\n  ' + ",\n  ".join(json.dumps(x) for x in cases) + "\n]" for n, cases in vectors.items())
    return "{\n" + ",\n".join(sections) + "\n}\n"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    return dict(json.loads(VECTORS.read_text()))


def _vector_arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "logits": torch.tensor([[float(value) for value in case["logits"]]], dtype=torch.float32),
        "seeds": np.array([case["seed"]], np.uint64),
        "positions": np.array([case["t"]], np.int32),
        "temperatures": np.array([case["temperature"]], np.float32),
    }


def _assert_same(found: Any, wanted: Any, where: str) -> None:
    """Assert equality up to the last bits of float64, in which math libraries differ."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            _assert_same(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            _assert_same(one, other, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12), where
    else:
        assert found == wanted, where


def test_the_shipped_vectors_follow_the_law(vectors: dict[str, Any]) -> None:
    made_by = "PYTHONPATH=tests python tests/torch/kernels/test_law.py"
    _assert_same(vectors, make_vectors(), f"docs/law_vectors.json (made by: {made_by})")


def test_philox_gives_the_published_words(vectors: dict[str, Any]) -> None:
    for case in vectors["philox"]:
        counter, key, words = ([int(word, 16) for word in case[name].split()] for name in ("counter", "key", "words"))
        assert philox_words(counter, key) == words
        tensors = philox.philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert [int(word) for word in tensors] == words


def test_torch_noise_follows_the_law(vectors: dict[str, Any]) -> None:
    for case in vectors["noise"]:
        seed = torch.from_numpy(np.array([case["seed"]], np.uint64).view(np.int64))
        position, size = torch.tensor([case["t"]]), case["v"] + 1
        assert int(philox.random_words(seed, position, size)[0, -1]) == case["word"]
        assert float(philox.gumbel_noise(seed, position, size)[0, -1]) == pytest.approx(case["gumbel"], abs=1e-13)


def test_sample_obeys_the_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["sampling"]:
        masks = {"top_k": np.array([case["top_k"]], np.int32), "top_p": np.array([case["top_p"]], np.float32)}
        arguments = _vector_arguments(case) | masks
        for result in (gumbel.sample(**arguments), gumbel.sample_reference(**_tensors(arguments))):
            assert int(result.tokens[0]) == case["token"], case
            assert float(result.log_probs[0]) == pytest.approx(case["log_prob"], abs=1e-6, rel=1e-7)
            assert float(result.tempered_log_probs[0]) == pytest.approx(case["tempered_log_prob"], abs=1e-6, rel=1e-7)


def test_candidates_obey_the_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["candidates"]:
        given, k = _vector_arguments(case), case["k"]
        for result in (gumbel.candidates(**given, k=k), gumbel.candidates_reference(**_tensors(given), k=k)):
            found = [token for token in result.tokens[0].tolist() if token >= 0]
            assert found == case["tokens"], case
            assert result.scores[0, : len(found)].tolist() == pytest.approx(case["scores"], abs=1e-6, rel=1e-6)


def _tensors(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return numpy arguments as tensors; unsigned seeds by their bits."""

    def tensor(value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.from_numpy(value.view(np.int64) if value.dtype == np.uint64 else value)

    return {name: tensor(value) for name, value in arguments.items()}


NUM_DRAWS = 1_000_000
LOGITS = [0.3, -1.2, 2.0, 2.0, 0.9, -4.0, 1.1, -0.2, 0.0, 1.5, -2.5]  # 11 tokens, two tied


def _draws(T: float, top_k: int, top_p: float, *, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    n = len(seeds)
    logits = torch.tensor(LOGITS).expand(n, -1)  # one row, n times: stride 0
    result = gumbel.sample(
        logits, seeds, positions, np.full(n, T, np.float32), np.full(n, top_k, np.int32), np.full(n, top_p, np.float32)
    )
    assert result.finite.all()
    return result.tokens.numpy()


def _p_value(tokens: np.ndarray, T: float, top_k: int, top_p: float) -> float:
    """Return the chi-square p-value against the exact distribution; dropped tokens must not appear."""
    kept = sorted(kept_ids([f32(x) for x in LOGITS], f32(T), top_k, f32(top_p)))
    weights = np.exp(np.array(LOGITS)[kept] / T)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert counts[kept].sum() == len(tokens), "a masked token was drawn"
    return _chi_square(counts[kept], weights / weights.sum() * len(tokens), len(kept) - 1)


def _chi_square(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    distance = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(distance / 2)))


def _kolmogorov(values: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]) -> float:
    n, wanted = values.size, distribution(np.sort(values))
    distance = max((np.arange(1, n + 1) / n - wanted).max(), (wanted - np.arange(n) / n).max())
    return float(2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * n * distance**2) for k in range(1, 101)))


@pytest.mark.parametrize(
    ("T", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.8), (0.7, 5, 0.9), (2.5, 3, 0.6)]
)
def test_draws_follow_the_softmax(T: float, top_k: int, top_p: float) -> None:
    seeds, positions = np.arange(NUM_DRAWS, dtype=np.int64), np.full(NUM_DRAWS, 17, np.int32)
    assert _p_value(_draws(T, top_k, top_p, seeds=seeds, positions=positions), T, top_k, top_p) > 1e-4


def test_draws_along_one_sample_follow_the_softmax() -> None:
    seeds, positions = np.full(NUM_DRAWS, -3, np.int64), np.arange(NUM_DRAWS, dtype=np.int32)
    assert _p_value(_draws(1.0, 0, 1.0, seeds=seeds, positions=positions), 1.0, 0, 1.0) > 1e-4


def test_noise_is_standard_gumbel_and_independent() -> None:
    """Neighbours in seed, position and token are independent; mean, variance and distribution are Gumbel's."""
    seeds = torch.arange(400)[:, None].expand(400, 50).flatten()  # [seed, position] flattened
    noises = philox.gumbel_noise(seeds, torch.arange(50).repeat(400), 12).reshape(400, 50, 12).numpy()
    n = noises.size
    assert abs(noises.mean() - np.euler_gamma) < 5 * math.pi / math.sqrt(6 * n)
    assert _kolmogorov(noises.flatten(), lambda x: np.exp(-np.exp(-x))) > 1e-4
    for axis in range(3):
        here, there = np.moveaxis(noises, axis, 0)[:-1].flatten(), np.moveaxis(noises, axis, 0)[1:].flatten()
        assert abs(np.corrcoef(here, there)[0, 1]) < 5 / math.sqrt(n), f"axis {axis}"


def test_draws_of_neighbouring_positions_are_independent() -> None:
    seeds, positions = np.repeat(np.arange(200_000), 2), np.tile(np.arange(2, dtype=np.int32), 200_000)
    first, second = _draws(1.0, 3, 1.0, seeds=seeds, positions=positions).reshape(-1, 2).T
    table = np.histogram2d(first, second, bins=[np.arange(len(LOGITS) + 1)] * 2)[0]
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    assert _chi_square(table, expected, (table.shape[0] - 1) * (table.shape[1] - 1)) > 1e-4


if __name__ == "__main__":
    VECTORS.write_text(_dump(make_vectors()))
    sys.stdout.write(f"wrote {VECTORS.name}\n")
