"""gRPC server of a process's weight versions."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator

import grpc

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Role
from rlhfspec.training.weights.base import retired
from rlhfspec.training.weights.grpc_messages import METHOD, PIECE_BYTES, SERVICE, WeightsAnswer, WeightsRequest, parse
from rlhfspec.training.weights.packed import Buffers, PackedWeights

log = logging.getLogger(__name__)
MAX_STREAMS = 4  # at once: each holds a thread of the server, which health checks need too


class GrpcWeightServer:
    """gRPC handler that serves weights. `readers`: certificate names that may fetch, None for all."""

    def __init__(self, kept: KeptVersions, *, readers: Collection[str] | None = None) -> None:
        self._kept = kept
        self._readers = readers
        self._free = threading.Semaphore(MAX_STREAMS)
        self._lock = threading.Lock()
        self.sent: Counter[Key] = Counter()  # bytes of each version
        self.refused: Counter[str] = Counter()  # requests, by reason

    def add_to(self, server: grpc.Server) -> None:
        method = grpc.unary_stream_rpc_method_handler(self._serve)  # raw bytes, without serializers
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))

    def _serve(self, content: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._accepted(content, context)
        key = (request.job, request.role, request.version)
        packed = self._kept.find(key)
        if packed is None:
            yield _said(WeightsAnswer(kind="missing", have=self._kept.newest(request.job, request.role)))
            return
        if not self._free.acquire(blocking=False):
            yield _said(WeightsAnswer(kind="busy"))
            return
        try:
            yield _said(WeightsAnswer(kind="weights"))
            yield from self._stream(key, packed)
        finally:
            self._free.release()

    def _accepted(self, content: bytes, context: grpc.ServicerContext) -> WeightsRequest:
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])]
        if self._readers is not None and names and not set(names).intersection(self._readers):
            self._refuse("role", context, grpc.StatusCode.PERMISSION_DENIED, f"{names[0]} may not read weights")
        try:
            return parse(WeightsRequest, content)
        except MalformedRecord as error:
            self._refuse("malformed", context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("refused") from None

    def _refuse(self, kind: str, context: grpc.ServicerContext, code: grpc.StatusCode, reason: str) -> None:
        with self._lock:
            self.refused[kind] += 1
        log.warning("weights refused to %s: %s", context.peer(), reason)
        context.abort(code, reason)

    def _stream(self, key: Key, packed: PackedWeights) -> Iterator[bytes]:
        yield packed.header.model_dump_json().encode()
        for begin in range(0, packed.header.num_bytes, PIECE_BYTES):
            piece = bytes(packed.memory[begin : begin + PIECE_BYTES])
            yield piece
            with self._lock:
                self.sent[key] += len(piece)


def _said(answer: WeightsAnswer) -> bytes:
    return answer.model_dump_json().encode()


Key = tuple[str, Role, int]  # job, role, version


class KeptVersions:
    """Cache of the newest `keep` versions of each job's role, with reusable memory."""

    def __init__(self, keep: int) -> None:
        assert keep >= 1
        self.buffers = Buffers()
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[Key, PackedWeights] = {}

    def find(self, key: Key) -> PackedWeights | None:
        with self._lock:
            return self._versions.get(key)

    def newest(self, job: str, role: Role) -> int:
        with self._lock:
            return max(self._numbers(job, role), default=0)

    def make_room(self, key: Key) -> None:
        """Drop versions that this one will replace, to reuse their memory."""
        job, role, coming = key
        with self._lock:
            for old in retired({*self._numbers(job, role), coming}, self._keep):
                if old != coming:
                    del self._versions[job, role, old]

    def add(self, key: Key, packed: PackedWeights) -> None:
        job, role, _ = key
        with self._lock:
            self._versions[key] = packed
            for old in retired(self._numbers(job, role), self._keep):
                del self._versions[job, role, old]

    def _numbers(self, job: str, role: Role) -> set[int]:
        return {key[2] for key in self._versions if key[:2] == (job, role)}
