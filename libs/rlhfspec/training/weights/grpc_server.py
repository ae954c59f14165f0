"""Gives weights away: to whoever asks the trainer, once; to the others by those who have them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator

import grpc

from rlhfspec.errors import MalformedRecord
from rlhfspec.training.weights.grpc_messages import METHOD, PIECE_BYTES, SERVICE, WeightsAnswer, WeightsRequest, parse
from rlhfspec.training.weights.kept import KeptVersions, Version

log = logging.getLogger(__name__)
LIFE_SIGN_SECONDS = 1.0  # between two, for those who wait for what this process waits for
MAX_STREAMS = 4  # at once: each holds a thread of the server, which others need for health


class GrpcWeightServer:
    """`readers`: names in the certificates of those who may have weights; None: whoever can connect."""

    def __init__(self, kept: KeptVersions, *, readers: Collection[str] | None = None) -> None:
        self._kept = kept
        self._readers = readers
        self._free = threading.Semaphore(MAX_STREAMS)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.sent: Counter[tuple[str, str, int]] = Counter()  # bytes of each version
        self.refused: Counter[str] = Counter()  # requests, by reason

    def add_to(self, server: grpc.Server) -> None:
        method = grpc.unary_stream_rpc_method_handler(self._serve)  # without serializers: bytes as they are
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))

    def close(self) -> None:
        """Ends the streams that wait for what will not come."""
        self._closed.set()

    def _serve(self, content: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        request = self._accepted(content, context)
        version = self._kept.find((request.job, request.role, request.version))
        if version is None or version.state == "lost" or (request.only_whole and version.state != "whole"):
            yield _said(WeightsAnswer(kind="missing", have=self._kept.newest(request.job, request.role)))
            return
        if version.fanout is not None and not request.direct:
            peer = version.fanout.source(request.address, lost=request.lost)
            if peer is not None:
                yield _said(WeightsAnswer(kind="ask", peer=peer))
                return
        if not self._free.acquire(blocking=False):
            yield _said(WeightsAnswer(kind="busy"))
            return
        try:
            yield _said(WeightsAnswer(kind="weights"))
            yield from self._stream(version, request.offset, context)
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

    def _stream(self, version: Version, offset: int, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The header, then pieces as they are there."""
        while version.packed is None:
            yield from self._patience(version, -1, context)
        packed = version.packed
        yield packed.header.model_dump_json().encode()
        at, end, memory = offset, packed.header.num_bytes, packed.memory
        while at < end:
            if version.num_bytes <= at:
                yield from self._patience(version, at, context)
                continue
            upto = min(at + PIECE_BYTES, version.num_bytes)
            yield bytes(memory[at:upto])
            with self._lock:
                self.sent[version.key] += upto - at
            at = upto

    def _patience(self, version: Version, after: int, context: grpc.ServicerContext) -> Iterator[bytes]:
        version.wait(LIFE_SIGN_SECONDS, after=after)
        if version.state == "lost" or self._closed.is_set():
            context.abort(grpc.StatusCode.ABORTED, "this version was lost here too")
        if version.num_bytes <= after:
            yield b""


def _said(answer: WeightsAnswer) -> bytes:
    return answer.model_dump_json().encode()
