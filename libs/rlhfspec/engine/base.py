"""Protocols and records of a generation engine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.params import SamplingParams, plain

if TYPE_CHECKING:
    from rlhfspec.messages.records.models import Drafting, ModelReport

MOST_RANGE_BYTES = 4 << 20  # of one range, which takes about a millisecond to copy between two steps
Bytes = npt.NDArray[np.uint8]
MOST_TOP_LOG_PROBS = 20
TopLogProbs = tuple[tuple[int, float], ...]  # (token id, log-prob under the sampling distribution), the best first
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 64 bits
    group: str = ""  # samples of one prompt share a group; empty: group by prompt
    history: tuple[tuple[int, ...], ...] = ()  # earlier rollouts of the same prompt, for the suffix drafter
    weights_version: int | None = None  # None: the loaded ones
    stays: bool = False  # keep the KV after finishing for `extend`, while its memory is not needed
    top_log_probs: int = 0  # how many of the best tokens at each position to report in Gain
    priority: int = 0  # a higher one gets a row first, if need be one of a running sequence, which waits meanwhile

    def __post_init__(self) -> None:
        for name in ("seed", "weights_version"):
            object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Statistics of a sequence. They never influence its tokens."""

    num_verifications: int = 0  # target forwards that produced at least one token
    num_drafted: int = 0  # nodes verified
    num_accepted: int = 0  # nodes accepted
    num_preemptions: int = 0  # times its KV was recomputed
    num_moves: int = 0  # to another engine
    strategies: tuple[tuple[str, int], ...] = ()  # (plan name, decoding steps under it), by name

    @property
    def tokens_per_verification(self) -> float:
        produced = self.num_verifications + self.num_accepted
        return produced / self.num_verifications if self.num_verifications else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # under the untempered target
    tempered_log_probs: tuple[float, ...]  # under the sampling distribution (temperature, top-k, top-p)
    weights_versions: tuple[int, ...]  # per token
    finish_reason: FinishReason
    error: str = ""
    text: str | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Tokens that one sequence gained in a step, including those of a stop string."""

    id: str
    token_ids: IntArray
    log_probs: FloatArray
    tempered_log_probs: FloatArray
    finish_reason: FinishReason | None = None  # None: not finished
    top_log_probs: tuple[TopLogProbs, ...] = ()  # per token, if the request asks for them

    @classmethod
    def of_completion(cls, done: Completion, *, since: int = 0) -> Gain:
        """Return the gain of a finished sequence beyond the first `since` response tokens."""
        return cls(
            id=done.id,
            token_ids=np.array(done.token_ids[since:], np.int32),
            log_probs=np.array(done.log_probs[since:], np.float32),
            tempered_log_probs=np.array(done.tempered_log_probs[since:], np.float32),
            finish_reason=done.finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """Result of one `step()`. Each token is reported once, by the engine that sampled it."""

    gains: Iterable[Gain]  # sequences that gained a token or ended, in commit order; built lazily, iterable repeatedly
    finished: tuple[Completion, ...]
    num_decoding: int
    num_prefill_tokens: int
    num_verified_nodes: int
    num_committed: int
    strategy: str
    seconds: float
    num_passes: int = 1
    num_paused: int = 0  # decoding sequences left out, for clients


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    room: int  # estimate of how many more sequences can run now: free rows, limited by free blocks
    num_free_blocks: int  # including kept ones
    num_blocks: int
    weights_version: int
    num_steps: int
    num_generated_tokens: int
    num_preemptions: int
    num_free_tokens: int = 0  # tokens whose KV fits: in free blocks and those of sequences that only stay
    num_kept_blocks: int = 0  # free blocks that keep a prompt's KV for reuse
    num_staying: int = 0  # finished sequences that may be extended
    num_prefill_tokens: int = 0  # run before decoding: prompts, and recomputation after lost memory
    num_found_tokens: int = 0  # prompt tokens skipped: siblings, kept prompts or an earlier turn had their KV
    num_moves: int = 0  # sequences taken over from other engines
    num_recomputed_tokens: int = 0  # tokens of moved sequences whose KV was recomputed here
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # per expert, by layer
    drafting: tuple[Drafting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningReport:
    """Cost and benefit of training a drafter online."""

    num_tokens: int = 0  # learnt from, counting every use
    seconds: float = 0.0  # spent on learning
    saved_seconds: float = 0.0  # saved in steps, compared with the drafter at the start; an estimate
    law_before: tuple[float, ...] = ()  # drafts of the policy's choice on unseen text, by depth, as it was at the start
    law_now: tuple[float, ...] = ()
    version: int = 0  # tokens learnt from, here or in the engine it was taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    version: int
    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    id: str
    num_generated: int
    num_held: int  # prompt and response tokens; KV grows with them
    num_prefill: int  # tokens to run before decoding: of the prompt, or again after lost memory
    is_waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a sequence that another engine checks before any KV is sent."""

    schema: int
    fingerprints: tuple[str, ...]  # of target and draft (if any): model, weights, arithmetic
    architecture: str  # the part of the target's fingerprint that does not depend on weights
    weights_version: int
    epoch: int  # of the sequence's present stay in memory; KV of another epoch does not fit
    num_tokens: int
    request: Request  # without its history


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Number of positions whose KV the destination already has, per KV space (target, then draft if any)."""

    epoch: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRange:
    """KV of committed positions: `kv[i]` [n, bytes per position] is KV space i from `start.positions[i]` on."""

    request_id: str
    start: Watermark
    kv: tuple[Bytes, ...]
    checksum: int  # xxh3_64 of the concatenated parts of `kv`; verified before anything is written

    @property
    def end(self) -> Watermark:
        ends = (first + len(kv) for first, kv in zip(self.start.positions, self.kv, strict=True))
        return Watermark(epoch=self.start.epoch, positions=tuple(ends))

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.kv))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """State from which another engine continues a sequence. Without `rest`, that engine recomputes the KV."""

    manifest: Manifest
    rest: KVRange | None
    token_ids: IntArray  # prompt and response
    log_probs: FloatArray  # of the response, like all that follow
    tempered_log_probs: FloatArray
    weights_versions: IntArray
    counters: tuple[int, ...]  # named in rlhfspec.engine.scheduling.sequences
    strategies: tuple[tuple[str, int], ...]
    acceptance: tuple[tuple[str, float, float], ...]  # per drafter, learnt from this sequence: shift, precision
    history: tuple[tuple[int, ...], ...]  # of the request; the manifest omits it
    age_seconds: float


class EngineProtocol(Protocol):
    """Interface of every engine. Only `submit` and `load_weights` affect the generated tokens (docs/law.md)."""

    @property
    def abilities(self) -> Abilities:
        return Abilities()

    @property
    def reports(self) -> Mapping[str, ModelReport]:
        """Return the load-time check of each model: `model`, and `drafter` if present."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a sequence. Raise InvalidRequest, naming the field, if it can never run here."""
        ...

    @property
    def has_work(self) -> bool: ...

    def step(self) -> EngineStep:
        """Run one forward pass for all sequences that can run. Never raise for one bad sequence."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Drop a sequence, even one that stays after finishing or is being moved. Return False if it is unknown."""
        ...

    @property
    def weights_version(self) -> int: ...

    def load_weights(self, state_dict: Mapping[str, Any], *, version: int) -> None:
        """Replace the target's weights between steps. `version` must grow; running sequences recompute their KV."""
        ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, blocks and sequences are inconsistent. Call it between steps."""
        ...

    def close(self) -> None: ...


class MovableByTokens(EngineProtocol, Protocol):
    """Engine whose sequences can move to another one, which recomputes their KV.

    Moves happen between steps:

        there.import_sequence(here.export_sequence(name))
        here.cancel(name)                                  # or, after any failure: there.cancel, here.reattach
    """

    def sequences(self) -> tuple[SequenceView, ...]:
        """Return the sequences that wait or run here, but are not moving."""
        ...

    def manifest(self, request_id: str) -> Manifest:
        """Return a sequence's manifest; epoch 0 means that it has no KV to move. Raise InvalidRequest if unknown."""
        ...

    def export_sequence(self, request_id: str) -> SequenceState:
        """Stop a sequence and return its state. The engine keeps it until `cancel` or `reattach`."""
        ...

    def import_sequence(self, arrived: SequenceState) -> None:
        """Take over an exported sequence and continue it. A refused state changes nothing."""
        ...

    def reattach(self, request_id: str) -> None: ...


class MovableWithKV(MovableByTokens, Protocol):
    """Engine whose sequences can also move with their KV, most of it sent while they still decode.

    KV is sent in ranges:

        mark = there.reserve(here.manifest(name))          # refuses here, before any KV is sent
        while (kv := here.export_range(name, mark)).num_positions > few:  # `here` keeps decoding in between
            there.import_range(kv)
            mark = kv.end
        there.import_sequence(here.export_sequence(name, mark))
        here.cancel(name)                                  # or, after any failure: there.cancel, here.reattach
    """

    def reserve(self, manifest: Manifest) -> Watermark:
        """Reserve a row and blocks until `import_sequence` or `cancel`; return the positions whose KV is already here.

        Raise SequenceStateError or InvalidRequest, naming the field.
        """
        ...

    def export_range(
        self, request_id: str, start: Watermark, *, max_bytes: int = MOST_RANGE_BYTES, out: Bytes | None = None
    ) -> KVRange:
        """Copy committed KV after `start`: at most `max_bytes`, but at least one position.

        The arrays are consecutive views of `out`. Raise SequenceStateError("epoch") if KV was lost since `start`.
        """
        ...

    def import_range(self, kv: KVRange) -> None:
        """Write KV into the reserved blocks. Ranges come in order; a refused range changes nothing."""
        ...

    def export_sequence(self, request_id: str, start: Watermark | None = None) -> SequenceState:
        """Stop a sequence and return its state with the KV after `start` (default: all)."""
        ...

    def import_sequence(self, arrived: SequenceState) -> None:
        """Take over an exported sequence; without room, or under newer weights, queue it and recompute its KV."""
        ...


class Learning(Protocol):
    """Online learning of a drafter, between steps. Tokens never depend on it."""

    @property
    def report(self) -> LearningReport: ...

    def learn_while_idle(self) -> bool:
        """Take one optimizer step while idle. Return False if there was nothing to learn."""
        ...

    def learnt(self) -> Learnt: ...

    def take(self, learnt: Learnt) -> bool:
        """Adopt weights if learnt from more tokens, and return whether. Raise InvalidRequest for another drafter's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Optional abilities of an engine: the object that provides each, or None."""

    moves_tokens: MovableByTokens | None = None
    moves_kv: MovableWithKV | None = None
    learning: Learning | None = None
