"""Takes a version of weights from one address, as far as that goes; whom to ask next is the store's affair."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Weights
from rlhfspec.training.weights.grpc_messages import METHOD, PIECE_BYTES, SERVICE, WeightsAnswer, WeightsRequest, parse
from rlhfspec.training.weights.kept import Version
from rlhfspec.training.weights.packed import MAX_HEADER_BYTES, WeightsHeader

TICK_SECONDS = 0.25
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_HEADER_BYTES + PIECE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # who was away a moment ago is tried at once
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOutcome:
    """`whole`: all bytes are there. `wrong`: they, or what was said of them, are not what was announced."""

    kind: Literal["whole", "ask", "missing", "busy", "failed", "wrong", "other"]
    problem: str = ""
    peer: str = ""
    have: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """`stall_seconds`: for the next sign of life; `deadline`: on `clock`, for all; `closed` ends everything."""

    clock: AwakeClock
    deadline: float
    stall_seconds: float
    closed: threading.Event

    @property
    def is_over(self) -> bool:
        return self.closed.is_set() or self.clock.now() > self.deadline


def channel_to(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    server_name: str | None,
    options: tuple[tuple[str, int], ...] = (),
) -> grpc.Channel:
    """`server_name`: in the certificate of whoever is asked; None: the address is."""
    target = f"dns:///{address}"  # whatever an address may look like, it is no other scheme
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.secure_channel(target, credentials, options=(*options, *named))


class GrpcWeightClient:
    """`server_name`: in the certificate of whoever is asked; None: the address is."""

    def __init__(
        self, credentials: grpc.ChannelCredentials | None, max_bytes: int, server_name: str | None = None
    ) -> None:
        self._credentials = credentials
        self._server_name = server_name
        self._max_bytes = max_bytes

    def take(
        self, address: str, request: WeightsRequest, record: Weights, version: Version, patience: Patience
    ) -> FetchOutcome:
        """Into `version`, after what is there already."""
        with channel_to(address, self._credentials, self._server_name, OPTIONS) as channel:
            call = channel.unary_stream(f"/{SERVICE}/{METHOD}")(request.model_dump_json().encode())
            with _watched(call, patience) as watch:
                try:
                    return self._receive(_signs_of_life(call, watch), record, version)
                except MalformedRecord as error:
                    return FetchOutcome(kind="wrong", problem=f"{address}: {error.problem}")
                except grpc.RpcError:
                    reason = watch.gave_up or f"{call.code().name.lower()}: {call.details()}"
                    return FetchOutcome(kind="failed", problem=f"{address}: {reason}")
                finally:
                    call.cancel()

    def _receive(self, messages: Iterator[bytes], record: Weights, version: Version) -> FetchOutcome:
        answer = parse(WeightsAnswer, next(messages, b""))
        if answer.kind != "weights":
            return FetchOutcome(kind=answer.kind, peer=answer.peer, have=answer.have)
        header = WeightsHeader.parse(next(messages, b""), max_bytes=self._max_bytes)
        if (header.job, header.role, header.version) != (record.job, record.role, record.version):
            raise MalformedRecord(f"these are {header.job}/{header.role}/{header.version}"[:200])
        if header.digest != record.digest:
            return FetchOutcome(kind="other", problem=f"holds weights of digest {header.digest}, not {record.digest}")
        if version.packed is None:
            version.begin(header)
        elif version.packed.header != header:
            raise MalformedRecord("the header differs from that of the bytes that are here already")
        for piece in messages:
            if version.num_bytes + len(piece) > header.num_bytes:
                raise MalformedRecord(f"more than the {header.num_bytes} bytes that were promised")
            version.add(piece)
        if not version.is_complete:
            raise MalformedRecord(f"ended after {version.num_bytes} of {header.num_bytes} bytes")
        if not version.finish():
            raise MalformedRecord(f"the bytes are not those of digest {record.digest}")
        return FetchOutcome(kind="whole")


class _Watch:
    def __init__(self) -> None:
        self.num_signs = 0  # of life
        self.gave_up = ""
        self.done = threading.Event()


def _signs_of_life(call: Iterator[bytes], watch: _Watch) -> Iterator[bytes]:
    for message in call:
        watch.num_signs += 1
        if message:
            yield message


@contextmanager
def _watched(call: grpc.Call, patience: Patience) -> Iterator[_Watch]:
    """Ends the call when the other side is silent for too long: a read of its own has no time limit."""
    watch = _Watch()

    def run() -> None:
        signs, since = 0, patience.clock.now()
        while not watch.done.wait(TICK_SECONDS):
            now = patience.clock.now()
            if watch.num_signs != signs:
                signs, since = watch.num_signs, now
            if now - since > patience.stall_seconds:
                watch.gave_up = f"silent for {patience.stall_seconds:g} s"
            elif patience.is_over:
                watch.gave_up = "no time left"
            if watch.gave_up:
                call.cancel()
                return

    thread = threading.Thread(target=run, name="weights-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.done.set()
        thread.join()
