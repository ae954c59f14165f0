"""gRPC client that fetches a version of weights from one address."""

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
from rlhfspec.training.weights.packed import MAX_HEADER_BYTES, Buffers, GrowingDigest, PackedWeights, WeightsHeader

TICK_SECONDS = 0.25
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_HEADER_BYTES + PIECE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # an address that just failed can be tried again at once
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOutcome:
    """Result of one attempt. `packed`: only for kind `whole`. Kind `wrong`: bytes or header do not match the record.

    Kind `other`: the version has another digest. `have`: newest version at an address that lacks this one.
    """

    kind: Literal["whole", "missing", "busy", "failed", "wrong", "other"]
    problem: str = ""
    have: int = 0
    packed: PackedWeights | None = None


def channel_to(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    server_name: str | None,
    options: tuple[tuple[str, int], ...] = (),
) -> grpc.Channel:
    target = f"dns:///{address}"  # the prefix rules out other schemes
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.secure_channel(target, credentials, options=(*options, *named))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcWeightClient:
    """Client whose streams end after `stall_seconds` of silence or when `closed` is set."""

    credentials: grpc.ChannelCredentials | None
    server_name: str | None
    max_bytes: int
    stall_seconds: float
    closed: threading.Event
    buffers: Buffers

    def take(self, address: str, record: Weights) -> FetchOutcome:
        request = WeightsRequest(job=record.job, role=record.role, version=record.version)
        with channel_to(address, self.credentials, self.server_name, OPTIONS) as channel:
            call = channel.unary_stream(f"/{SERVICE}/{METHOD}")(request.model_dump_json().encode())
            with self._watched(call) as watch:
                try:
                    return self._receive(_counted(call, watch), record)
                except MalformedRecord as error:
                    return FetchOutcome(kind="wrong", problem=f"{address}: {error.problem}")
                except grpc.RpcError:
                    reason = watch.gave_up or f"{call.code().name.lower()}: {call.details()}"
                    return FetchOutcome(kind="failed", problem=f"{address}: {reason}")
                finally:
                    call.cancel()

    def _receive(self, messages: Iterator[bytes], record: Weights) -> FetchOutcome:
        answer = parse(WeightsAnswer, next(messages, b""))
        if answer.kind != "weights":
            return FetchOutcome(kind=answer.kind, have=answer.have)
        header = WeightsHeader.parse(next(messages, b""), max_bytes=self.max_bytes)
        if (header.job, header.role, header.version) != (record.job, record.role, record.version):
            raise MalformedRecord(f"these are {header.job}/{header.role}/{header.version}"[:200])
        if header.digest != record.digest:
            return FetchOutcome(kind="other", problem=f"holds weights of digest {header.digest}, not {record.digest}")
        packed = PackedWeights(header, self.buffers.take(header.num_bytes))
        digest, num_bytes = GrowingDigest(packed), 0
        for piece in messages:
            if num_bytes + len(piece) > header.num_bytes:
                raise MalformedRecord(f"more than the {header.num_bytes} bytes that were promised")
            packed.memory[num_bytes : num_bytes + len(piece)] = piece
            num_bytes += len(piece)
            digest.advance(num_bytes)
        if num_bytes < header.num_bytes:
            raise MalformedRecord(f"ended after {num_bytes} of {header.num_bytes} bytes")
        digest.advance(num_bytes)  # includes empty tensors
        if digest.hexdigest() != record.digest:
            raise MalformedRecord(f"the bytes are not those of digest {record.digest}")
        return FetchOutcome(kind="whole", packed=packed)

    @contextmanager
    def _watched(self, call: grpc.Call) -> Iterator[_Watch]:
        """Cancel the call if the server is silent too long, because reads have no timeout."""
        watch, clock = _Watch(), AwakeClock()

        def run() -> None:
            num_messages, since = 0, clock.now()
            while not watch.done.wait(TICK_SECONDS):
                now = clock.now()
                if watch.num_messages != num_messages:
                    num_messages, since = watch.num_messages, now
                if self.closed.is_set():
                    watch.gave_up = "closed"
                elif now - since > self.stall_seconds:
                    watch.gave_up = f"silent for {self.stall_seconds:g} s"
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


class _Watch:
    def __init__(self) -> None:
        self.num_messages = 0
        self.gave_up = ""
        self.done = threading.Event()


def _counted(call: Iterator[bytes], watch: _Watch) -> Iterator[bytes]:
    for message in call:
        watch.num_messages += 1
        yield message
