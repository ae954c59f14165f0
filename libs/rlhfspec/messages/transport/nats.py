"""Transport between processes over NATS with JetStream; needs the extra `rlhfspec[processes]`.

- Only the caller of `declare` needs rights to create a stream.
- During an outage, calls wait up to `publish_timeout_seconds`. Duplicate ids are dropped while their message is kept
  and for an hour; after a server restart, only while it is kept.
- The process that holds or pulls an unhandled message writes its dead letter, deduplicated by id.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlhfspec.errors import InvalidRequest, MessageTooLarge, TransportFull, TransportUnavailable
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Kind, Receipt, Subscription
from rlhfspec.messages.transport.clock import Clock, SystemClock
from rlhfspec.messages.transport.jetstream.connection import ANSWER_SECONDS, LAST_ANSWER_SECONDS, Connection, status_of
from rlhfspec.messages.transport.jetstream.deliveries import ID, Consuming, NatsReceipt, Token
from rlhfspec.messages.transport.jetstream.proof import NO_PROOF, NatsProof
from rlhfspec.messages.transport.jetstream.reading import PullReading, WatchReading
from rlhfspec.messages.transport.jetstream.streams import (
    FOR_EVER,
    Declared,
    Keeping,
    declared_of,
    key_word,
    requests_for,
    stream_name,
)

FULL = 10077  # JetStream's error code for a full stream
SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 0.5


class NatsTransport:
    """Transport over NATS; `publish_timeout_seconds` limits waits for room and for the server."""

    def __init__(
        self, connection: Connection, *, max_pending: int, publish_timeout_seconds: float, keeping: Keeping = FOR_EVER
    ) -> None:
        self._connection = connection
        self._clock = connection.clock
        self._max_pending = max_pending
        self._keeping = keeping
        self._publish_timeout_seconds = publish_timeout_seconds
        self._known: dict[str, Declared] = {}
        self._consuming: dict[tuple[str, str], Consuming] = {}
        self._readings: list[PullReading | WatchReading] = []

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str = "_INBOX",
        proof: NatsProof = NO_PROOF,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        max_pending: int = 8192,
        publish_timeout_seconds: float = 600.0,
        keeping: Keeping = FOR_EVER,
        connect_timeout_seconds: float = 5.0,
        role: str = "",
    ) -> NatsTransport:
        """Connect, or raise at once if the server is missing, too old, or without JetStream or TLS."""
        connection = await Connection.open(
            url,
            name=name,
            inbox_prefix=inbox_prefix,
            proof=proof,
            tls=tls,
            clock=clock or SystemClock(),
            patience_seconds=publish_timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            role=role,
        )
        return cls(
            connection, max_pending=max_pending, publish_timeout_seconds=publish_timeout_seconds, keeping=keeping
        )

    def hurry(self, seconds: float) -> None:
        self._connection.hurry(seconds)

    async def declare(self, subject: str, kind: Kind, consumers: Iterable[Consumer] = ()) -> None:
        wanted = Declared(kind, {consumer.name: consumer for consumer in consumers})
        if kind != "work" and wanted.consumers:
            raise InvalidRequest("consumers", list(wanted.consumers), f"must be empty: {subject} is {kind}, not work")
        there = await self._look(subject)
        if there is not None and there != wanted:
            raise InvalidRequest("subject", subject, f"was declared as {there.kind} for {dict(there.consumers)}")
        of_stream, *of_consumers = requests_for(subject, wanted, self._max_pending, self._keeping)
        for call, body in of_consumers if there is not None else (of_stream, *of_consumers):
            _raise_error(subject, await self._connection.api(call, body))
        self._known[subject] = wanted

    async def _look(self, subject: str) -> Declared | None:
        info = await self._connection.api(f"STREAM.INFO.{stream_name(subject)}")
        if info.get("error", {}).get("code") == 404:
            return None
        _raise_error(subject, info)
        return declared_of(subject, info)

    async def is_declared(self, subject: str) -> bool:
        return await self._look(subject) is not None

    async def until_declared(self, subject: str, seconds: float) -> None:
        """Wait until the subject is declared; raise TransportUnavailable at the timeout."""
        end = self._clock.now() + seconds
        while not await self.is_declared(subject):
            if self._clock.now() >= end:
                raise TransportUnavailable(self._connection.url, f"no process declared {subject} within {seconds:g} s")
            await self._clock.sleep(_LONGEST_WAIT_SECONDS)

    async def _declared(self, subject: str) -> Declared:
        self._connection.refuse_if_closed(subject)
        if subject not in self._known:
            found = await self._look(subject)
            if found is None:
                raise InvalidRequest("subject", subject, "was not declared")
            self._known[subject] = found
        return self._known[subject]

    @property
    def num_reconnects(self) -> int:
        return self._connection.num_reconnects

    async def answers(self, subject: str, within_seconds: float) -> bool:
        """Return whether the server answers one request about the subject in time."""
        answer = await self._connection.ask(f"$JS.API.STREAM.INFO.{stream_name(subject)}", seconds=within_seconds)
        return answer is not None and status_of(answer) != "503"

    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        kind = (await self._declared(subject)).kind
        all_headers = {**(headers or {}), ID: id}
        self._connection.refuse_too_large(subject, id, data, all_headers)
        if kind == "signal":
            await self._connection.send(subject, data, headers=all_headers)
            return True
        place = subject if kind == "work" else f"{subject}.{key_word(key)}"
        return await self._store(subject, place, data, all_headers)

    async def _store(self, subject: str, place: str, data: bytes, headers: Mapping[str, str]) -> bool:
        """Send to subject `place` until the server confirms; return False for a duplicate."""
        began = self._clock.now()
        wait, problem = SHORTEST_WAIT_SECONDS, ""
        while True:
            left = max(self._left(began, problem), LAST_ANSWER_SECONDS)
            answer = await self._connection.ask(place, data, headers, seconds=min(ANSWER_SECONDS, left))
            if answer is None:
                problem = "no answer"
            elif status_of(answer) == "503":
                problem = "no stream stores it"
                self._known.pop(subject, None)
                await self._declared(subject)  # raises if the stream is gone; otherwise the server is still starting
            else:
                said = json.loads(answer.data)
                error = said.get("error", {})
                if not error:
                    return not said.get("duplicate", False)
                if error["err_code"] != FULL and error["code"] < 500:
                    _raise_error(subject, said)
                problem = "full" if error["err_code"] == FULL else error["description"]
            left = self._left(began, problem)
            if left <= 0.0:
                raise await self._gave_up(
                    subject, problem, min(self._clock.now() - began, self._publish_timeout_seconds)
                )
            await self._clock.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _left(self, began: float, problem: str) -> float:
        """Return the seconds left to retry; only the problem "full" may use the whole publish timeout."""
        left = began + self._publish_timeout_seconds - self._clock.now()
        return left if problem == "full" else min(left, self._connection.left(began))

    async def _gave_up(self, subject: str, problem: str, waited: float) -> Exception:
        seconds = min(waited, self._publish_timeout_seconds)
        if problem != "full":
            return TransportUnavailable(self._connection.url, f"{subject} not stored for {seconds:.3g} s: {problem}")
        stream = stream_name(subject)
        state = (await self._connection.api(f"STREAM.INFO.{stream}"))["state"]
        consumers = (await self._connection.api(f"CONSUMER.LIST.{stream}", {}))["consumers"]
        behind = [each["name"] for each in consumers if each["ack_floor"]["stream_seq"] < state["first_seq"]]
        return TransportFull(subject, state["messages"], behind, seconds)

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        consuming = await self._consumer(subject, consumer.name)
        if consuming.consumer != consumer:
            raise InvalidRequest("consumer", consumer, f"{subject} was declared with {consuming.consumer}")
        reading = await PullReading(consuming).open()
        self._readings.append(reading)
        return reading

    async def watch(self, subject: str) -> Subscription:
        of_state = (await self._declared(subject)).kind == "state"
        reading = WatchReading(self._connection, subject, of_state=of_state, max_unread=self._max_pending)
        self._readings.append(await reading.open())
        return reading

    async def _consumer(self, subject: str, name: str) -> Consuming:
        declared = await self._declared(subject)
        if name not in declared.consumers:
            raise InvalidRequest("consumer", name, f"was not declared for {subject}")
        consuming = Consuming(self._connection, subject, declared.consumers[name], self._bury)
        return self._consuming.setdefault((subject, name), consuming)

    async def _bury(self, letter: dead_letters.DeadLetter) -> None:
        """Publish a dead letter if its subject is declared."""
        subject = dead_letters.dead_letter_subject(letter.subject)
        if subject not in self._known and await self._look(subject) is None:
            return
        data = dead_letters.encode(letter)
        try:
            await self.publish(subject, data, id=letter.letter_id, key=letter.letter_id)
        except MessageTooLarge as error:
            reason = f"{letter.reason} ({len(letter.data)} bytes that are left out: {error})"
            short = replace(letter, data=b"", reason=reason)
            await self.publish(subject, dead_letters.encode(short), id=letter.letter_id, key=letter.letter_id)

    async def release(self, subject: str, name: str) -> None:
        """Nak all unacknowledged deliveries of consumer `name`, oldest first."""
        await self._consumer(subject, name)
        stream = stream_name(subject)
        info = await self._connection.api(f"CONSUMER.INFO.{stream}.{name}")
        _raise_error(subject, info)
        delivered, acked = info["delivered"], info["ack_floor"]
        if not info["num_ack_pending"]:
            return
        numbers = range(acked["stream_seq"] + 1, delivered["stream_seq"] + 1)
        tokens = [f"$JS.ACK.{stream}.{name}.1.{number}.{delivered['consumer_seq']}.0.0" for number in numbers]
        for token in tokens[:-1]:
            await self._connection.send(token, b"-NAK")
        await self._connection.ask(tokens[-1], b"-NAK")

    async def adopt(self, token: str, subject: str, name: str) -> Receipt:
        parsed = Token.parse(token)
        if (parsed.stream, parsed.consumer) != (stream_name(subject), name):
            raise InvalidRequest("token", token, f"is not a delivery token of {subject} for {name}")
        return NatsReceipt(await self._consumer(subject, name), token)

    async def close(self) -> None:
        try:
            await asyncio.gather(*(reading.close() for reading in self._readings))
        finally:
            for consuming in self._consuming.values():
                consuming.close()
            await self._connection.close()


def _raise_error(subject: str, answer: Mapping[str, object]) -> None:
    error = answer.get("error")
    if isinstance(error, dict):
        raise InvalidRequest("subject", subject, f"the server refuses: {error.get('description')}")
