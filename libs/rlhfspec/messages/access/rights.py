"""Least NATS permissions of each role, derived from the stages in `messages.loop`.

A role is a stage, or `view` or `control`, which observe everything. On a laptop `control` (the supervisor) creates the
streams. In a cluster the operator does, because the right to create a stream does not restrict its subjects.

>>> [subject for subject in rights_of("reward", "sums", "3f2a").publish if subject.startswith("rlhf.")]
['rlhf.sums.3f2a.score', 'rlhf.sums.3f2a.heartbeat', 'rlhf.sums.3f2a.workerinfo.*', 'rlhf.sums.3f2a.dead.*']
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages import loop
from rlhfspec.messages.transport.jetstream.streams import latest_of, stream_name

CONTROL = "control"
BUS_ROLES = (*loop.BY_NAME, CONTROL)
# By role: stages whose workers an idle process of the role may host, acting in that stage's role.
GUESTS: dict[str, tuple[str, ...]] = {"generator": ("reference", "critic")}


@dataclass(frozen=True, slots=True)
class RoleRights:
    """NATS permissions of a role; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_of(role: str, uid: str) -> str:
    """Return the prefix of reply subjects that only this role of the run may read."""
    return f"_INBOX_{role}_{uid}"


def rights_of(role: str, job: str, uid: str, *, declares: bool = False) -> RoleRights:
    """Return the NATS permissions of a role; with `declares`, `control` may create streams."""
    if role not in BUS_ROLES:
        raise InvalidRequest("role", role, f"must be one of {', '.join(BUS_ROLES)}")
    granted = _Granted(role, job, uid)
    if role == CONTROL:
        if declares:
            granted.to_open_the_run()
        granted.to_look_on_at_all()
    elif loop.BY_NAME[role] in loop.OBSERVERS:
        granted.to_look_on(loop.BY_NAME[role].consumes)
    else:
        granted.to_work(loop.BY_NAME[role])
    return RoleRights(tuple(dict.fromkeys(granted.publish)), tuple(dict.fromkeys(granted.subscribe)))


class _Granted:
    def __init__(self, role: str, job: str, uid: str) -> None:
        self._role = role
        self._job = job
        self._uid = uid
        self._dead = loop.dead_letters(job, uid)
        self.publish: list[str] = []
        self.subscribe = [f"{inbox_of(role, uid)}.>"]

    def to_work(self, stage: loop.Stage) -> None:
        for record in (*stage.produces, *loop.OF_A_PROCESS):
            self._to_publish(record)
        for record in stage.consumes:
            if loop.KINDS[record] == "work":
                self._to_pull(self._subject(record), stage.name)
        self.to_look_on(record for record in stage.consumes if loop.KINDS[record] != "work")
        self.to_look_on((*stage.watches, *loop.SEEN_BY_ALL))

    def to_look_on(self, records: Iterable[type]) -> None:
        for record in records:
            self._to_watch(self._subject(record), of_state=loop.KINDS[record] == "state")

    def to_open_the_run(self) -> None:
        for record in loop.KINDS:
            stream = self._stream(self._subject(record))
            self.publish.append(f"$JS.API.STREAM.CREATE.{stream}")
            if loop.KINDS[record] == "work":
                for stage in loop.consumers_of(record):
                    self.publish.append(f"$JS.API.CONSUMER.CREATE.{stream}.{stage.name}")
                    self._to_release(stream, stage.name)
        self.publish.append(f"$JS.API.STREAM.CREATE.{stream_name(self._dead)}")

    def to_look_on_at_all(self) -> None:
        self.to_look_on(loop.KINDS)
        self._to_watch(self._dead, of_state=True)

    def _to_publish(self, record: type) -> None:
        subject, kind = self._subject(record), loop.KINDS[record]
        stream = self._stream(subject)
        self.publish.append(f"{subject}.*" if kind == "state" else subject)
        if kind == "work":
            self.publish.append(f"$JS.API.CONSUMER.LIST.{stream}")  # to name the slow consumer in TransportFull

    def _to_pull(self, subject: str, name: str) -> None:
        stream = self._stream(subject)
        self.publish += [
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}",
            f"$JS.API.STREAM.MSG.GET.{stream}",  # to read the message for its dead letter
            f"{self._dead}.*",
        ]
        self._stream(self._dead)
        self._to_release(stream, name)

    def _to_release(self, stream: str, name: str) -> None:
        self.publish += [f"$JS.API.CONSUMER.INFO.{stream}.{name}", f"$JS.ACK.{stream}.{name}.>"]

    def _to_watch(self, subject: str, *, of_state: bool) -> None:
        stream = self._stream(subject)
        self.subscribe.append(latest_of(subject) if of_state else subject)
        if of_state:
            self.publish.append(f"$JS.API.STREAM.MSG.GET.{stream}")

    def _stream(self, subject: str) -> str:
        """Return the subject's stream name, and add the right to query that stream's declaration."""
        stream = stream_name(subject)
        self.publish.append(f"$JS.API.STREAM.INFO.{stream}")
        return stream

    def _subject(self, record: type) -> str:
        return loop.subject(self._job, self._uid, record)
