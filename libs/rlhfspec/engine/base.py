"""The contract of a generation engine: the records that go in and come out, and what engines promise.

Every engine is an `EngineProtocol`: it generates. `MovableByTokens` and `MovableWithKV` are promises about moves;
`Abilities` says which of them an engine keeps. Torch-free. `rlhfspec.engine.core.Engine` keeps all of them on Hugging
Face models; `rlhfspec.engine.oracle` holds the slow, obvious decoder that every fast path is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.params import SamplingParams, plain

if TYPE_CHECKING:
    from rlhfspec.messages.records.models import ModelReport

MOST_RANGE_BYTES = 4 << 20  # of one range, to be copied in about a millisecond between two steps
Bytes = npt.NDArray[np.uint8]
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
    stays: bool = False  # when it is finished, its KV stays for `extend`, as long as its memory is not needed

    def __post_init__(self) -> None:
        for name in ("seed", "weights_version"):
            object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Statistics of how one sequence was generated. They never influence its tokens."""

    num_verifications: int = 0  # target forwards that produced at least one token
    num_drafted: int = 0  # nodes verified
    num_accepted: int = 0  # nodes accepted
    num_preemptions: int = 0  # times its KV was computed again
    num_moves: int = 0  # to another engine
    strategies: tuple[tuple[str, int], ...] = ()  # (plan name, decoding steps under it), by name

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
class Gain:
    """The tokens that one sequence gained in a step, and how it ended if it did.

    All gains of a sequence, in their order, are the tokens of its `Completion`. A token that was sampled behind the
    end of a sequence (a stop token, a stop string, the length) is cut and never reported. The tokens that complete a
    stop string are reported, as they are in `Completion.token_ids`; only `Completion.text` leaves the string out.
    """

    id: str
    token_ids: IntArray
    log_probs: FloatArray
    tempered_log_probs: FloatArray
    finish_reason: FinishReason | None = None  # None: it goes on

    @classmethod
    def of_completion(cls, done: Completion, *, since: int = 0) -> Gain:
        """Return the gain of a sequence that has ended, without the first `since` tokens of its response.

        >>> done = Completion(id="a", prompt_token_ids=(1,), token_ids=(5, 6), log_probs=(-1.0, -2.0),
        ...     tempered_log_probs=(-1.0, -2.0), weights_versions=(0, 0), finish_reason="length")
        >>> Gain.of_completion(done, since=1).token_ids.tolist()
        [6]
        """
        return cls(
            id=done.id,
            token_ids=np.array(done.token_ids[since:], np.int32),
            log_probs=np.array(done.log_probs[since:], np.float32),
            tempered_log_probs=np.array(done.tempered_log_probs[since:], np.float32),
            finish_reason=done.finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """The result of one `step()`. Where it was several forward passes, numbers are sums over them.

    `gains` holds every sequence that gained a token or ended, in the order of the commits. The engine that sampled a
    token reports it once: neither a preemption nor a move repeats it or leaves it out.
    """

    gains: Iterable[Gain]  # as often as wanted; ours are made when they are read
    finished: tuple[Completion, ...]
    num_decoding: int
    num_prefill_tokens: int
    num_verified_nodes: int
    num_committed: int
    strategy: str
    seconds: float
    num_passes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    num_running: int
    num_waiting: int
    room: int  # for about so many more to run now: free rows, as far as free blocks last for what sequences here hold
    num_free_blocks: int  # with those that are kept
    num_blocks: int
    weights_version: int
    num_steps: int
    num_generated_tokens: int
    num_preemptions: int
    num_free_tokens: int = 0  # whose KV there is room for: free blocks, and those of sequences that only stay
    num_kept_blocks: int = 0  # of the free ones: that hold a prompt, should it come again
    num_staying: int = 0  # finished sequences that may be extended
    num_prefill_tokens: int = 0  # run before their sequences could decode: prompts, and again what lost its memory
    num_found_tokens: int = 0  # that would have been, but their KV was there: siblings', kept, or of a turn before
    num_moves: int = 0  # sequences taken over from other engines
    num_recomputed_tokens: int = 0  # of these: what had run there, and had to run here again
    expert_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # each expert's, by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningReport:
    """What learning cost and brought so far. Tokens a verification are of steps that the drafter drafted for; None:
    there were none."""

    num_tokens: int = 0  # learnt from, each as often as it was used
    seconds: float = 0.0  # spent
    saved_seconds: float = 0.0  # in steps, after what the drafter was at the start; an estimate
    tokens_before: float | None = None  # a verification, before the drafter had learnt anything
    tokens_now: float | None = None
    num_accepted: tuple[int, ...] = ()  # verifications of its drafts in which 0, 1, 2, ... drafted tokens were accepted
    version: int = 0  # of what was learnt: tokens learnt from, here or elsewhere before


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What a drafter has learnt. `version`: from so many tokens, each as often as it was used."""

    version: int
    tensors: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """One sequence that waits or runs here, as the rebalancer sees it."""

    id: str
    num_generated: int
    num_held: int  # tokens in all, prompt and response: its KV grows with them
    num_prefill: int  # tokens that must run before it decodes: of its prompt, or again after it lost its memory
    is_waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a sequence that another engine checks before any KV is sent."""

    schema: int
    fingerprints: tuple[str, ...]  # of target and draft: model, weights, arithmetic; one only without a draft
    architecture: str  # what of the target's fingerprint stays when the weights change
    weights_version: int
    epoch: int  # of the sequence's present stay in memory; KV of another stay does not fit to it
    num_tokens: int
    request: Request  # without its history


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Positions whose KV is at the destination, in each KV space (target, and draft where there is one)."""

    epoch: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRange:
    """KV of committed positions, which never change: `kv[i]` [n, bytes a position] begins at `start.positions[i]`."""

    request_id: str
    start: Watermark
    kv: tuple[Bytes, ...]
    checksum: int  # xxh3_64 of the parts of `kv`, one behind the other; looked at before anything is written

    @property
    def end(self) -> Watermark:
        ends = (first + len(kv) for first, kv in zip(self.start.positions, self.kv, strict=True))
        return Watermark(epoch=self.start.epoch, positions=tuple(ends))

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.kv))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceState:
    """All that another engine needs to go on at its next step: the rest of the KV, and what is no KV.

    A state without `rest` holds tokens only: the importer computes the KV again, with the same result.
    """

    manifest: Manifest
    rest: KVRange | None
    token_ids: IntArray  # prompt and response
    log_probs: FloatArray  # of the response, as all that follow
    tempered_log_probs: FloatArray
    weights_versions: IntArray
    counters: tuple[int, ...]  # rlhfspec.engine.scheduling.sequences names them
    strategies: tuple[tuple[str, int], ...]
    acceptance: tuple[tuple[str, float, float], ...]  # drafter, and what it learnt of this sequence: shift, precision
    history: tuple[tuple[int, ...], ...]  # the request's; the manifest leaves it out
    age_seconds: float


class EngineProtocol(Protocol):
    """The contract of every engine: it generates. By the law, only `submit` and `load_weights` can change which tokens
    come out. Two defaults are there to inherit: an engine of no further abilities, in no other process."""

    @property
    def abilities(self) -> Abilities:
        """Return what this engine can do beyond generating."""
        return Abilities()

    @property
    def reports(self) -> Mapping[str, ModelReport]:
        """Return how each model was checked when it was loaded: `model`, and `drafter` if there is one."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a sequence. Raise InvalidRequest, naming the field, if it can never run here."""
        ...

    @property
    def has_work(self) -> bool:
        """Return whether any sequence is waiting or running."""
        ...

    def step(self) -> EngineStep:
        """Run one forward pass of the target for all sequences that can run, or a few that take milliseconds. Never
        raise for the fault of one."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a sequence, also one that stays or is moving. Return False if it is not here."""
        ...

    @property
    def weights_version(self) -> int:
        """Return the version of the loaded weights."""
        ...

    def load_weights(self, state_dict: Mapping[str, Any], *, version: int) -> None:
        """Replace the target's weights between steps. `version` must grow; running sequences recompute their KV."""
        ...

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, blocks and sequences do not add up. For use between two steps."""
        ...

    def close(self) -> None:
        """End the other processes that the engine computes in, and all that they started."""


class MovableByTokens(EngineProtocol, Protocol):
    """An engine whose sequences continue in another engine of its kind, which computes their KV again.

    A sequence moves in this order, `here` and `there` being two engines; all of it between steps:

        there.import_sequence(here.export_sequence(name))
        here.cancel(name)                                  # or, after any failure: there.cancel, here.reattach
    """

    def sequences(self) -> tuple[SequenceView, ...]:
        """Return the sequences that wait or run here, without those that are moving."""
        ...

    def manifest(self, request_id: str) -> Manifest:
        """Return the manifest of a sequence, of epoch 0 where its KV does not move. Raise InvalidRequest if the
        sequence is not here (it may have finished)."""
        ...

    def export_sequence(self, request_id: str) -> SequenceState:
        """Stop a sequence and return its state. It stays here until `cancel`, after the other engine has it, or
        `reattach`."""
        ...

    def import_sequence(self, arrived: SequenceState) -> None:
        """Continue a sequence at the next step, with its age. A state that is refused changes nothing."""
        ...

    def reattach(self, request_id: str) -> None:
        """Continue a sequence that was exported."""
        ...


class MovableWithKV(MovableByTokens, Protocol):
    """An engine whose sequences can also take their KV along, most of it while they still decode.

    A sequence moves in this order, `here` and `there` being two engines; all of it between steps:

        mark = there.reserve(here.manifest(name))          # refusals come now, before any KV is sent
        while (kv := here.export_range(name, mark)).num_positions > few:  # `here` decodes on in between
            there.import_range(kv)
            mark = kv.end
        there.import_sequence(here.export_sequence(name, mark))
        here.cancel(name)                                  # or, after any failure: there.cancel, here.reattach
    """

    def reserve(self, manifest: Manifest) -> Watermark:
        """Reserve a row and blocks for a sequence until `import_sequence` or `cancel`. Return what need not be sent,
        because siblings have it here. Raise SequenceStateError or InvalidRequest naming what differs or is too big."""
        ...

    def export_range(
        self, request_id: str, start: Watermark, *, max_bytes: int = MOST_RANGE_BYTES, out: Bytes | None = None
    ) -> KVRange:
        """Copy committed KV behind `start`, at most `max_bytes` but at least a position, while the sequence decodes.
        If `out` is given, write into it: flat, for `max_bytes` and at least a position; the parts are views of it, one
        behind the other. Raise SequenceStateError("epoch") if the sequence lost its memory since `start`."""
        ...

    def import_range(self, kv: KVRange) -> None:
        """Write KV into the reserved blocks. Ranges come in order; a range that is refused changes nothing."""
        ...

    def export_sequence(self, request_id: str, start: Watermark | None = None) -> SequenceState:
        """Stop a sequence and return its state with the KV behind `start`, or all KV without `start`."""
        ...

    def import_sequence(self, arrived: SequenceState) -> None:
        """Continue a sequence at the next step, with its age. Without a reservation or room, or under newer weights, it
        is queued and recomputes its KV. A state that is refused changes nothing."""
        ...


class Learning(Protocol):
    """The learning of an engine's drafter. Between two steps the engine itself lets it learn, in its share of the time
    and while no finished sequence waits to be returned. No token depends on it."""

    @property
    def report(self) -> LearningReport:
        """Return what learning cost and brought so far."""
        ...

    def learn_while_idle(self) -> bool:
        """Take one optimizer step while the engine has nothing else to do. Return whether there was one to take."""
        ...

    def learnt(self) -> Learnt:
        """Return a copy of what the drafter drafts with."""
        ...

    def take(self, learnt: Learnt) -> bool:
        """Continue, between two steps, from what another engine's drafter has learnt, if that is from more tokens.
        Return whether it is. Raise InvalidRequest, with nothing changed, where it is another drafter's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What an engine can do beyond generating: for each ability the object that has it, or None."""

    moves_tokens: MovableByTokens | None = None
    moves_kv: MovableWithKV | None = None
    learning: Learning | None = None
