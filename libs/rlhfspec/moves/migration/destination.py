"""Destination's half of the move protocol: decides which attempts to take, without clock, engine or I/O.

    arrived(message) -> reply, or None: execute the message, then done(message) -> reply

Messages of one sample arrive one at a time. Invariants:

- An attempt is taken only under a lease, which its first message gets or forfeits. So `Refused` is final, and late
  copies of messages change nothing.
- A taken sequence moves on only after `Settled` from its source, or after `SETTLED_SECONDS`. Otherwise the source could
  receive `Gone` from this process's successor, and resume a sequence that a third process runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rlhfspec.moves.migration import messages
from rlhfspec.moves.migration.messages import MoveMessage, Reply, Told

LEASE_SECONDS = 15.0  # from a source's last message until its reservation is freed
DOUBT_SECONDS = 20.0  # while a source in doubt keeps asking, before it forgets
SETTLED_SECONDS = 2 * DOUBT_SECONDS  # doubled, because clocks of two machines drift
MOST_REMEMBERED = 1024  # attempts of one source
MOST_SOURCES = 1024
MOST_LEASES = 8  # at once

Fate = Literal["open", "refused", "taken"]


class Judgement(NamedTuple):
    """Decision about a message: samples whose memory is freed first, and the reply."""

    freed: list[str]
    reply: Reply | None  # None: the message has to be carried out


@dataclass(slots=True)
class _Lease:
    attempt: messages.Reserve
    until: float
    is_busy: bool = True  # the engine is working on it
    mark: bytes = b""


@dataclass(slots=True)
class _SourceAttempts:
    """Outcomes of one source's attempts; those up to `floor` may be forgotten."""

    floor: int = 0
    fates: dict[int, Fate] = field(default_factory=dict)
    recomputed: dict[int, int] = field(default_factory=dict)

    def fate(self, number: int) -> Fate | Literal["new", "unknown"]:
        return self.fates.get(number, "unknown" if number <= self.floor else "new")

    def settle(self, number: int, fate: Fate) -> None:
        self.fates[number] = fate
        while len(self.fates) > MOST_REMEMBERED:
            oldest = min(self.fates)
            self.floor = max(self.floor, oldest)
            del self.fates[oldest]
            self.recomputed.pop(oldest, None)


class Destination:
    def __init__(self, incarnation: str, offer: str = "") -> None:
        self.incarnation = incarnation
        self.offer = offer
        self.is_closed = False
        self._leases: dict[str, _Lease] = {}  # by sample
        self._sources: dict[str, _SourceAttempts] = {}
        self._unsettled: dict[str, tuple[str, int, float]] = {}  # sample: its source, the attempt, its deadline

    @property
    def arriving(self) -> frozenset[str]:
        return frozenset(self._leases)

    def may_leave(self, sample: str, now: float) -> bool:
        return sample not in self._unsettled or now >= self._unsettled[sample][2]

    def close(self) -> list[str]:
        """Refuse new attempts, end leases unless busy, and return the samples whose memory to free."""
        self.is_closed = True
        idle = [lease for lease in self._leases.values() if not lease.is_busy]
        return [sample for lease in idle for sample in self._end(lease, "refused")]

    def expire(self, now: float) -> list[str]:
        over = [lease for lease in self._leases.values() if not lease.is_busy and now >= lease.until]
        for sample in [sample for sample, (_, _, until) in self._unsettled.items() if now >= until]:
            del self._unsettled[sample]
        return [sample for lease in over for sample in self._end(lease, "refused")]

    def arrived(self, message: Told, now: float) -> Judgement:
        expired = self.expire(now)
        if message.destination != self.incarnation:
            return Judgement(expired, messages.Gone(**message.head(), here=self.incarnation))
        freed, reply = self._judge(message, now)
        return Judgement(expired + freed, reply)

    def done(
        self,
        message: Told,
        now: float,
        refusal: tuple[str, str] | None = None,
        *,
        mark: bytes = b"",
        num_recomputed: int = 0,
    ) -> Judgement:
        freed, lease = self.expire(now), self._lease_of(message)
        assert lease is not None, "it was busy, so it was not ended"
        lease.is_busy, lease.until = False, now + LEASE_SECONDS
        if refusal is not None:
            ended = self._end(lease, "refused")
            has_kept = not isinstance(message, messages.Reserve)
            return Judgement(freed + ended if has_kept else freed, _refused(message, *refusal))
        match message:
            case messages.Reserve():
                lease.mark = mark
                return Judgement(freed, self._reserved(lease))
            case messages.Range(key=key):
                return Judgement(freed, messages.Copied(**message.head(), key=key))
            case _:
                self._end(lease, "taken")
                self._source(message.source).recomputed[message.number] = num_recomputed
                self._unsettled[message.sample] = (message.source, message.number, now + SETTLED_SECONDS)
                return Judgement(freed, self._taken(message))

    def _judge(self, message: Told, now: float) -> Judgement:
        source = self._source(message.source)
        lease = self._lease_of(message)
        match source.fate(message.number):
            case "taken":
                return Judgement([], self._taken(message))
            case "unknown":
                return Judgement([], messages.Unknown(**message.head()))
            case "new" if isinstance(message, messages.Reserve):
                return self._reserve(message, now)
            case "new" | "refused":
                source.settle(message.number, "refused")
                return Judgement([], _refused(message, "lease", "none, or it expired"))
        assert lease is not None, "an open attempt has a lease"
        lease.until = now + LEASE_SECONDS
        match message:
            case messages.Reserve():
                return Judgement([], self._reserved(lease))
            case messages.Range() | messages.HandOver():
                lease.is_busy = True
                return Judgement([], None)
            case _:
                return Judgement(self._end(lease, "refused"), _refused(message, "attempt", "given up"))

    def _reserve(self, message: messages.Reserve, now: float) -> Judgement:
        source = self._source(message.source)
        before = self._leases.get(message.sample)
        freed: list[str] = []
        if before is not None and before.attempt.source == message.source and before.attempt.number < message.number:
            freed = self._end(before, "refused")  # its source started a new attempt
        elif before is not None:
            source.settle(message.number, "refused")
            return Judgement([], _refused(message, "sample", "is arriving from another generator"))
        if self.is_closed or len(self._leases) >= MOST_LEASES:
            source.settle(message.number, "refused")
            why = ("leaving", "takes no more sequences") if self.is_closed else ("busy", "others are arriving")
            return Judgement(freed, _refused(message, *why))
        source.settle(message.number, "open")
        self._leases[message.sample] = _Lease(message, now + LEASE_SECONDS)
        return Judgement(freed, None)

    def _taken(self, message: Told) -> messages.Taken:
        if isinstance(message, messages.Settled):
            unsettled = self._unsettled.get(message.sample)
            if unsettled is not None and unsettled[:2] == (message.source, message.number):
                del self._unsettled[message.sample]
        recomputed = self._source(message.source).recomputed.get(message.number, 0)
        return messages.Taken(**message.head(), num_recomputed=recomputed)

    def _reserved(self, lease: _Lease) -> messages.Reserved:
        return messages.Reserved(**lease.attempt.head(), mark=lease.mark, offer=self.offer)

    def _lease_of(self, message: MoveMessage) -> _Lease | None:
        lease = self._leases.get(message.sample)
        same = lease is not None and (lease.attempt.source, lease.attempt.number) == (message.source, message.number)
        return lease if same else None

    def _end(self, lease: _Lease, fate: Fate) -> list[str]:
        del self._leases[lease.attempt.sample]
        self._source(lease.attempt.source).settle(lease.attempt.number, fate)
        return [lease.attempt.sample] if lease.attempt.has_kv else []

    def _source(self, incarnation: str) -> _SourceAttempts:
        found = self._sources.pop(incarnation, None) or _SourceAttempts()
        self._sources[incarnation] = found  # least recently used sources are forgotten first
        if len(self._sources) > MOST_SOURCES:
            del self._sources[next(iter(self._sources))]
        return found


def _refused(message: MoveMessage, field: str, reason: str) -> messages.Refused:
    return messages.Refused(**message.head(), field=field, reason=reason)
