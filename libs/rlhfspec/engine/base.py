"""What the rest of the system sees of a generation engine: records in, records out, one Protocol.

Torch-free. `rlhfspec.engine.core.Engine` implements the Protocol on Hugging Face models;
`rlhfspec.engine.oracle` holds the slow, obvious decoder that every fast path is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhfspec.engine.params import SamplingParams, is_int, plain
from rlhfspec.errors import InvalidRequest

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate.

    Example:
        >>> Request(id="job/0/7/1", prompt_token_ids=(72, 105), params=SamplingParams(max_tokens=8), seed=11).group
        ''
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 64 bits
    group: str = ""  # samples of one prompt share a group; empty: the prompt itself is the group
    history: tuple[tuple[int, ...], ...] = ()  # earlier rollouts of the same prompt, for the suffix drafter
    weights_version: int | None = None  # None: whatever is loaded

    def __post_init__(self) -> None:
        for name in ("seed", "weights_version"):
            object.__setattr__(self, name, plain(getattr(self, name)))


def check_types(request: Request) -> None:
    """Raises InvalidRequest, naming the field, for what is no request in any engine.

    >>> check_types(Request(id="a", prompt_token_ids=(1.5,), params=SamplingParams(), seed=0))  # type: ignore[arg-type]
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: prompt_token_ids: must be a tuple of whole numbers, at least one (got (1.5,))
    """
    seed, version = request.seed, request.weights_version
    checks = (
        ("id", isinstance(request.id, str) and request.id != "", "must be a text"),
        ("prompt_token_ids", _are_ids(request.prompt_token_ids) and len(request.prompt_token_ids) > 0,
         "must be a tuple of whole numbers, at least one"),
        ("params", isinstance(request.params, SamplingParams), "must be SamplingParams"),
        ("seed", is_int(seed) and 0 <= seed < 1 << 64, "must be a whole number that fits in 64 bits without sign"),
        ("group", isinstance(request.group, str), "must be a text"),
        ("history", isinstance(request.history, tuple) and all(map(_are_ids, request.history)),
         "must be a tuple of tuples of whole numbers"),
        ("weights_version", version is None or is_int(version), "must be a whole number, or None"),
    )  # fmt: skip
    for name, holds, problem in checks:
        if not holds:
            raise InvalidRequest(name, getattr(request, name), problem)


def _are_ids(values: object) -> bool:
    if not isinstance(values, tuple):
        return False
    return set(map(type, values)) <= {int} or all(map(is_int, values))  # the first is ten times as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """How one sequence was generated. It never influences which tokens came out."""

    num_verifications: int = 0  # target forwards that produced at least one token
    num_drafted: int = 0  # nodes verified
    num_accepted: int = 0  # nodes accepted
    num_preemptions: int = 0

    @property
    def tokens_per_verification(self) -> float:
        produced = self.num_verifications + self.num_accepted
        return produced / self.num_verifications if self.num_verifications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sequence."""

    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # under the untempered target
    tempered_log_probs: tuple[float, ...]  # under the distribution really sampled from (temperature, top-k, top-p)
    weights_versions: tuple[int, ...]  # per token
    finish_reason: FinishReason
    error: str = ""
    text: str | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one `step()` did."""

    finished: tuple[Completion, ...]
    num_decoding: int
    num_prefill_tokens: int
    num_verified_nodes: int
    num_committed: int
    strategy: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    weights_version: int
    num_steps: int
    num_generated_tokens: int
    num_preemptions: int
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # each expert's, by layer


class EngineProtocol(Protocol):
    """The contract. By the law, nothing here but submit and load_weights can change which tokens come out."""

    def submit(self, request: Request) -> None:
        """Queue a sequence. Raises InvalidRequest naming the field when it can never run."""
        ...

    @property
    def has_work(self) -> bool:
        """Is any sequence waiting or running?"""
        ...

    def step(self) -> StepReport:
        """One target forward for everything that can run. Never raises for the fault of one sequence."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence; False when it is not here."""
        ...

    def load_weights(self, state_dict: dict[str, Any], *, version: int) -> None:
        """Swap the target's weights between steps. `version` must grow; running sequences recompute their KV."""
        ...

    def stats(self) -> EngineStats: ...

    def export_sequence(self, request_id: str) -> Any:
        """Detach a sequence with its KV; the engine forgets it."""
        ...

    def import_sequence(self, state: Any) -> None:
        """Take over an exported sequence and go on at the next step."""
        ...
