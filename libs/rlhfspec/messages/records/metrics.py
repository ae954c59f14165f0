"""Metrics of one trained step, a line of `steps.jsonl`.

Two runs of a job agree bit for bit in the *curve*; *measurements* describe one run on one machine. Numbers that do not
apply to the job are null.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlhfspec.errors import InvalidRequest, NumericalError

NUM_LENGTH_BINS = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics over a step's samples; `std` divides by their number."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the statistics of the values; exact sums make their order irrelevant."""
        mean = math.fsum(values) / len(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
        return cls(mean=mean, std=math.sqrt(variance), min=float(min(values)), max=float(max(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Statistics of response lengths in tokens. Histogram bin i counts lengths in (edges[i], edges[i + 1]]."""

    mean: float
    min: int
    p50: int
    p95: int
    max: int
    edges: tuple[int, ...]
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], *, max_tokens: int) -> Lengths:
        """Return the statistics of lengths >= 1, with edges that depend on `max_tokens` alone.

        >>> Lengths.of([1, 2, 2, 8], max_tokens=8)  # doctest: +NORMALIZE_WHITESPACE
        Lengths(mean=3.25, min=1, p50=2, p95=8, max=8, edges=(0, 1, 2, 3, 4, 5, 6, 7, 8),
                histogram=(1, 2, 0, 0, 0, 0, 0, 1))
        """
        ordered = sorted(lengths)
        num_bins = min(NUM_LENGTH_BINS, max_tokens)
        edges = tuple(round(place * max_tokens / num_bins) for place in range(num_bins + 1))
        return cls(
            mean=math.fsum(ordered) / len(ordered),
            min=ordered[0],
            p50=_percentile(ordered, 50),
            p95=_percentile(ordered, 95),
            max=ordered[-1],
            edges=edges,
            histogram=tuple(bisect_right(ordered, high) - bisect_right(ordered, low) for low, high in pairwise(edges)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbDifference:
    """Absolute difference between generator's and trainer's log-probs of a step's tokens, before its first update."""

    max: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds that each stage spent on a step; 0 for stages outside the job.

    Stages overlap, so their sum may exceed `step`, the wall time. `waiting` is the trainer's time without work.
    """

    generation: float
    reward: float
    reference: float
    critic: float
    training: float
    checkpoint: float
    waiting: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    step: int
    weights_version: int  # after the step
    weights_digest: str
    num_samples: int  # trained on
    num_dropped: int  # failed, or replaced by dynamic sampling
    num_prompts: int
    equal_reward_groups: int | None = None  # prompts whose samples got equal rewards; null without groups
    reward: Spread
    reward_components: Mapping[str, float]  # mean of each source, unweighted
    advantage: Spread
    kl: Mapping[str, float] | None  # to the reference, by the job's estimator and by k3, before the first update
    policy_loss: float
    value_loss: float | None
    kl_loss: float | None
    entropy: float  # nats per token, before the first update
    clip_fraction: float  # of tokens whose ratio was clipped
    explained_variance: float | None  # of the returns by the critic
    grad_norm: float  # before clipping
    learning_rate: float
    learning: Mapping[str, float]  # other metrics of the learner, by its names
    response_length: Lengths
    truncated_fraction: float  # of responses that reached maxTokens
    num_response_tokens: int
    tokens_per_second: float | None  # while generating; null if not measured
    accepted_per_verification: float | None  # drafted tokens; null if nothing was drafted
    strategy: Mapping[str, int]  # how often each draft strategy was chosen
    reward_by_column: Mapping[str, float] = field(default_factory=dict)  # mean by value of observability.byColumn
    num_by_column: Mapping[str, float] = field(default_factory=dict)  # samples by value of it
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # run by each expert of a layer
    log_prob_difference: LogProbDifference
    staleness_max: int  # versions between the weights that generated a token and those it trained
    seconds: Seconds
    started_unix_seconds: float
    finished_unix_seconds: float

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def kl_k3(self) -> float | None:
        """Return the k3 estimate of the KL, comparable between jobs, or None without KL."""
        return None if self.kl is None else self.kl["k3"]

    def to_line(self) -> str:
        return json_line(self, f"metrics of step {self.step}")

    @classmethod
    def from_line(cls, line: str) -> StepMetrics:
        return parse_line(cls, line, "steps.jsonl")


MEASUREMENTS = frozenset(
    {
        "tokens_per_second",
        "accepted_per_verification",
        "strategy",
        "expert_rows",
        "reward_by_column",  # observability may differ between runs of one curve
        "num_by_column",
        "log_prob_difference",
        "staleness_max",
        "seconds",
        "started_unix_seconds",
        "finished_unix_seconds",
    }
)
CURVE = tuple(field.name for field in fields(StepMetrics) if field.name not in MEASUREMENTS)
_ALWAYS_SAID = ("policy_loss", "entropy", "clip_fraction", "grad_norm", "learning_rate", "truncated_fraction")
_SAID_WHERE_IT_APPLIES = ("value_loss", "kl_loss", "explained_variance")
_KL_ESTIMATORS = ("k1", "k2", "k3")


def curve(line: str) -> dict[str, Any]:
    """Return the fields of a line in steps.jsonl that two runs of one job share bit for bit."""
    content = json.loads(line)
    return {name: content[name] for name in CURVE}


def learner_fields(said: Mapping[str, float]) -> dict[str, Any]:
    """Return the learner's numbers as fields of StepMetrics; other numbers go to `learning`.

    >>> said = {name: 0.5 for name in ("policy_loss", "entropy", "clip_fraction", "grad_norm", "learning_rate")}
    >>> said |= {"truncated_fraction": 0.0, "log_prob_difference_max": 3e-7, "log_prob_difference_mean": 4e-8}
    >>> said |= {"staleness_max": 1.0, "approximate_kl": 0.25, "reward_mean": 0.5, "kl_k3": 0.125}
    >>> fields = learner_fields(said)
    >>> fields["kl"], fields["staleness_max"], fields["learning"]
    ({'k3': 0.125}, 1, {'approximate_kl': 0.25})
    """
    rest = {name: value for name, value in said.items() if not name.startswith(("reward_", "response_"))}
    found: dict[str, Any] = {name: rest.pop(name) for name in _ALWAYS_SAID}
    found |= {name: rest.pop(name, None) for name in _SAID_WHERE_IT_APPLIES}
    found["kl"] = {name: rest.pop(f"kl_{name}") for name in _KL_ESTIMATORS if f"kl_{name}" in rest} or None
    found["staleness_max"] = int(rest.pop("staleness_max"))
    found["log_prob_difference"] = LogProbDifference(
        max=rest.pop("log_prob_difference_max"), mean=rest.pop("log_prob_difference_mean")
    )
    return found | {"learning": dict(sorted(rest.items()))}


def _percentile(ordered: Sequence[int], percent: int) -> int:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def json_line(metrics: Any, name: str) -> str:
    """Return a dataclass as a line of JSON, or raise NumericalError for nan and inf."""
    content = asdict(metrics)
    if (found := not_finite(content)) is not None:
        raise NumericalError(f"{name}: {found[0]} is {found[1]}")
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def not_finite(metrics: Any) -> tuple[str, float] | None:
    """Return (path, value) of the first number that is not finite, or None."""
    content = metrics if isinstance(metrics, dict) else asdict(metrics)
    return next(((path, value) for path, value in _floats(content) if not math.isfinite(value)), None)


def parse_line(kind: type[T], line: str, file: str) -> T:
    """Parse a line of `file` as the dataclass, or raise InvalidRequest."""
    try:
        return _adapter(kind).validate_python(json.loads(line))  # type: ignore[arg-type, no-any-return]
    except json.JSONDecodeError as error:
        raise InvalidRequest(file, line[:40], f"is not JSON: {error.msg}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{file}: {field}", first["input"], first["msg"]) from None


def _floats(content: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(content, float):
        yield path, content
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from _floats(value, f"{path}.{name}" if path else str(name))


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def example_step(*, step: int = 1, reward: float = 0.5) -> StepMetrics:
    return StepMetrics(
        step=step,
        weights_version=step,
        weights_digest=f"{step:064x}",
        num_samples=4,
        num_dropped=0,
        num_prompts=2,
        reward=Spread.of([reward - 0.25, reward, reward, reward + 0.25]),
        reward_components={"exact": reward},
        advantage=Spread.of([-1.0, 0.0, 0.0, 1.0]),
        kl={"k3": 0.001 * step},
        policy_loss=-0.01,
        value_loss=None,
        kl_loss=0.002,
        entropy=1.5,
        clip_fraction=0.02,
        explained_variance=None,
        grad_norm=0.8,
        learning_rate=3e-5,
        learning={"approximate_kl": 0.0001},
        response_length=Lengths.of([10, 20, 20, 60], max_tokens=64),
        truncated_fraction=0.0,
        num_response_tokens=110,
        tokens_per_second=1234.5,
        accepted_per_verification=1.75,
        strategy={"plain": 3, "suffix 1x4": 9},
        expert_rows={"model.layers.0.mlp.experts": (60, 40, 20)},
        log_prob_difference=LogProbDifference(max=3.1e-07, mean=4.0e-08),
        staleness_max=0,
        seconds=Seconds(
            generation=2.0, reward=0.1, reference=0.4, critic=0.0, training=1.5, checkpoint=0.2, waiting=2.1, step=3.8
        ),
        started_unix_seconds=1_700_000_000.0 + 4 * step,
        finished_unix_seconds=1_700_000_003.8 + 4 * step,
    )
