"""Source's half of the move protocol: state machine of one move, without clock, engine or I/O.

    start() --action--> done --event--> on --actions--> ... --> MoveEnd

Each action ends in one event. Replies to old attempts are ignored.

The source owns the sequence until it receives Taken. Between HandOver and the reply it is in doubt: the sequence stays
detached and the source sends Ask. Only Refused or Gone lets it resume. After DOUBT_SECONDS of silence it is forgotten;
then at most one other generator keeps its prompt in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.destination import DOUBT_SECONDS
from rlhfspec.moves.migration.messages import Reply, Told

_ASK_AGAIN_SECONDS = 0.5  # between two questions in doubt
MOST_ROUNDS = 3
MOST_ATTEMPTS = 3  # of one move; each preemption costs one
_WEIGHTS_FIELDS = ("weights_version", "fingerprint")  # refusals after which tokens are still welcome
How = Literal["kv", "tokens", "kept", "lost"]
# Codes of kept sequences, beside the fields of refusals and failures:
GONE, SILENT = "gone", "silent"  # the destination
STAYS = "stays"  # because of the source


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Described:
    manifest: bytes
    weights_version: int
    has_kv: bool  # the sequence runs here, so that it has some KV


@dataclass(frozen=True, slots=True)
class PackedKV:
    """Event of a packed range, sent or being sent; `is_last` if it reached the end of the KV."""

    kv: bytes
    end: bytes
    num_bytes: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Detached:
    state: bytes
    kv: bytes
    num_bytes: int
    prompt: bytes
    token: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Event of a failed action; `field`: its cause, such as `epoch` (KV lost), `finished` (sequence gone) or `link`."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    reply: Reply


@dataclass(frozen=True, slots=True)
class Silence:
    reason: str = "no reply"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Event of a cancelled move: the sequence stays or, if perhaps taken, is forgotten at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class SourceTick:
    """Event that ends Wait."""


Event = Described | PackedKV | Detached | Failed | Heard | Silence | GiveUp | SourceTick


# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Describe:
    """Action to read the manifest; ends in Described or Failed."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Action to send a message; ends in Heard, Silence, or Failed for an unsent Range."""

    message: Told


@dataclass(frozen=True, slots=True)
class Pack:
    """Action to pack a range after `mark` and send it; ends in PackedKV or Failed."""

    mark: bytes
    offer: str
    key: str


@dataclass(frozen=True, slots=True)
class Detach:
    """Action to stop the sequence and pack KV after `mark`; ends in Detached or Failed."""

    mark: bytes  # empty: tokens only
    offer: str
    key: str


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Reattach: ...


@dataclass(frozen=True, slots=True)
class LetGo:
    """Action to drop the sequence without ack or nak; `is_known` if the destination confirmed it."""

    is_known: bool


@dataclass(frozen=True, slots=True)
class Notify:
    message: Told


@dataclass(frozen=True, slots=True)
class MoveEnd:
    how: How
    reason: str = ""
    num_rounds: int = 0
    num_recomputed: int = 0
    code: str = ""  # if kept


Action = Describe | Tell | Pack | Detach | Wait | Reattach | LetGo | Notify | MoveEnd
State = Literal["describing", "reserving", "packing", "copying", "detaching", "doubt", "over"]


class MoveSource:
    def __init__(
        self, move: str, sample: str, *, source: str, destination: str, numbers: Iterator[int], must_go: bool = False
    ) -> None:
        """Begin a move; each attempt uses one of `numbers`, and `must_go` sends tokens if KV cannot move."""
        self.state: State = "describing"
        self._move, self._sample, self._ends = move, sample, (source, destination)
        self._numbers = numbers
        self._has_kv = True
        self._must_go = must_go
        self._number = 0
        self._attempts = 0
        self._mark, self._offer = b"", ""
        self._sent: PackedKV | None = None
        self._keys = 0
        self._rounds, self._ranges = 0, 0  # whole rounds, and ranges of the present round
        self._since = 0.0  # begin of doubt

    def start(self) -> list[Action]:
        return [Describe()]

    def on(self, event: Event, now: float) -> list[Action]:
        if self.state == "over" or self._is_old(event):
            return []
        if self.state == "doubt":
            return self._doubt(event, now)
        match event:
            case GiveUp(reason):
                return self._abort(STAYS, reason)
            case Heard(messages.Gone()):
                return self._keep(GONE, "the destination is gone")
            case Heard(messages.Refused(field=field, reason=reason)) if self._has_kv and self._goes_without(field):
                self._has_kv = False
                return self._again(reason)
            case Heard(messages.Refused(field="reservation", reason=reason)):  # it was preempted there
                return self._again(reason)
            case Heard(messages.Refused(field=field, reason=reason)):
                return self._keep(field, f"{field}: {reason}")
            case Failed(field="epoch", reason=reason):
                return [*self._parting(), *self._again(reason)]
            case Failed(field="link", reason=reason) if self._has_kv and self._must_go:
                self._has_kv = False
                return [*self._parting(), *self._again(reason)]
            case Failed(field, reason):
                return self._abort(field, f"{field}: {reason}")
            case Silence(reason):
                return self._abort(SILENT, reason)
        return self._go_on(event, now)

    def _is_old(self, event: Event) -> bool:
        return isinstance(event, Heard) and (event.reply.number != self._number or event.reply.source != self._ends[0])

    def _go_on(self, event: Event, now: float) -> list[Action]:
        match self.state, event:
            case "describing", Described():
                return self._reserve(event)
            case "reserving", Heard(messages.Reserved(mark=mark, offer=offer)):
                self._mark, self._offer = mark, offer
                return self._copy() if self._has_kv else self._detach()
            case "packing", PackedKV(num_bytes=0):
                return self._detach()
            case "packing", PackedKV():
                self.state, self._sent = "copying", event
                message = messages.Range(**self._head(), kv=event.kv, key=self.key, num_bytes=event.num_bytes)
                return [Tell(message)]
            case "copying", Heard(messages.Copied(key=key)) if key == self.key:
                return self._copied()
            case "detaching", Detached():
                return self._hand_over(event, now)
        return []

    @property
    def key(self) -> str:
        return f"{self._ends[0]}/{self._number}/{self._keys}"

    def _reserve(self, described: Described) -> list[Action]:
        self.state = "reserving"
        self._number = next(self._numbers)
        self._attempts += 1
        self._has_kv = self._has_kv and described.has_kv
        version = described.weights_version
        manifest = described.manifest
        return [Tell(messages.Reserve(**self._head(), manifest=manifest, weights_version=version, has_kv=self._has_kv))]

    def _copy(self) -> list[Action]:
        self.state = "packing"
        self._keys += 1
        return [Pack(self._mark, self._offer, self.key)]

    def _copied(self) -> list[Action]:
        """Return the next actions: copy another range, or detach if little is left."""
        assert self._sent is not None
        self._mark = self._sent.end
        self._ranges += 1
        if not self._sent.is_last:
            return self._copy()
        self._rounds += 1
        is_short, self._ranges = self._ranges == 1, 0
        return self._detach() if is_short or self._rounds >= MOST_ROUNDS else self._copy()

    def _detach(self) -> list[Action]:
        self.state = "detaching"
        self._keys += 1
        return [Detach(self._mark if self._has_kv else b"", self._offer, self.key)]

    def _hand_over(self, left: Detached, now: float) -> list[Action]:
        self.state, self._since = "doubt", now
        message = messages.HandOver(
            **self._head(), state=left.state, kv=left.kv, key=self.key if left.kv else "", num_bytes=left.num_bytes,
            prompt=left.prompt, token=left.token,
        )  # fmt: skip
        return [Tell(message)]

    def _doubt(self, event: Event, now: float) -> list[Action]:
        match event:
            case Heard(messages.Taken(num_recomputed=recomputed)):
                self.state = "over"
                how: How = "kv" if self._has_kv and not recomputed else "tokens"
                settled = Notify(messages.Settled(**self._head()))
                return [LetGo(is_known=True), settled, MoveEnd(how, "", self._rounds, recomputed)]
            case Heard(messages.Refused(field=field, reason=reason)):
                return [Reattach(), *self._keep(field, f"{field}: {reason}")]
            case _ if now - self._since >= DOUBT_SECONDS:  # a later Gone proves nothing: it may have been passed on
                self.state = "over"
                return [LetGo(is_known=False), MoveEnd("lost", "the destination never confirmed it", self._rounds)]
            case GiveUp(reason):
                self.state = "over"
                return [LetGo(is_known=False), MoveEnd("lost", reason, self._rounds)]
            case Heard(messages.Gone()):
                return [Reattach(), *self._keep(GONE, "the destination is gone")]
            case SourceTick():
                return [Tell(messages.Ask(**self._head()))]
            case Heard(messages.Unknown()) | Silence():
                return [Wait(_ASK_AGAIN_SECONDS)]
        return []

    def _again(self, reason: str) -> list[Action]:
        if self._attempts >= MOST_ATTEMPTS:
            return self._keep(STAYS, f"given up after {self._attempts} attempts: {reason}")
        self.state, self._mark, self._rounds, self._ranges = "describing", b"", 0, 0
        return [Describe()]

    def _abort(self, code: str, reason: str) -> list[Action]:
        return [*self._parting(), *self._keep(code, reason)]

    def _goes_without(self, field: str) -> bool:
        return field in _WEIGHTS_FIELDS or (self._must_go and field in ("link", "room"))

    def _parting(self) -> list[Action]:
        return [Notify(messages.Abort(**self._head()))] if self._number else []

    def _keep(self, code: str, reason: str) -> list[Action]:
        self.state = "over"
        return [MoveEnd("kept", reason, self._rounds, code=code)]

    def _head(self) -> dict[str, Any]:
        source, destination = self._ends
        return {
            "move": self._move, "sample": self._sample, "number": self._number,
            "source": source, "destination": destination,
        }  # fmt: skip
