"""A generator's side: takes part in a group when it is asked to, and has a version once all of it was compared."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import grpc
import torch

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Weights
from rlhfspec.training.weights.buffers import Buffers
from rlhfspec.training.weights.group.channel import BUCKET_SECONDS, Channels, Place, TwoBuffers, name_of
from rlhfspec.training.weights.group.messages import GROUP_SERVICE, GroupAsk, GroupBegin, GroupCommit, GroupSaid, Wish
from rlhfspec.training.weights.group.plan import Bucket, bucket_digest, buckets
from rlhfspec.training.weights.group.ways import Ways
from rlhfspec.training.weights.grpc_messages import WeightsMessage, parse
from rlhfspec.training.weights.packed import PackedWeights, WeightsHeader, machine_memory

COMMIT_SECONDS = 5.0  # for what is under way when the sender has sent all
log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=WeightsMessage)


class GroupReceiver:
    """`wish`: what this process says when it is asked, `ways` whether it wants at all. `writers`: roles, as their
    certificates name them, that may bring weights here; None: whoever can connect."""

    def __init__(self, wish: Wish, ways: Ways, *, writers: Collection[str] | None = None, max_bytes: int = 0) -> None:
        self._wish = wish
        self._ways = ways
        self._writers = writers
        self._max_bytes = max_bytes or machine_memory()
        self._lock = threading.Lock()
        self._buffers = Buffers()
        self._channels = Channels()
        self._arriving: _Arriving | None = None
        self._taken: tuple[tuple[str, str, int, str], PackedWeights] | None = None

    def add_to(self, server: grpc.Server) -> None:
        answers: list[tuple[type[Any], Callable[[Any], WeightsMessage]]] = [
            (GroupAsk, self._ask), (GroupBegin, self._begin), (GroupCommit, self._commit)
        ]  # fmt: skip
        methods = {
            kind.__name__: grpc.unary_unary_rpc_method_handler(self._answering(kind, answer))
            for kind, answer in answers
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GROUP_SERVICE, methods),))

    def take(self, record: Weights) -> dict[str, torch.Tensor] | None:
        """The version, if it came by the group."""
        with self._lock:
            if self._taken is None or self._taken[0] != (record.job, record.role, record.version, record.digest):
                return None
            return self._taken[1].tensors()

    def close(self) -> None:
        with self._lock:
            self._channels.close()

    def _answering(self, kind: type[_M], answer: Callable[[_M], WeightsMessage]) -> Callable[[bytes, Any], bytes]:
        def handle(content: bytes, context: grpc.ServicerContext) -> bytes:
            names = {name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])}
            if self._writers is not None and names.isdisjoint(self._writers):
                known = ", ".join(sorted(names)) or "one without a certificate"
                context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{known} may not bring weights")
            try:
                return answer(parse(kind, content)).model_dump_json().encode()
            except MalformedRecord as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise AssertionError("refused") from None

        return handle

    def _ask(self, ask: GroupAsk) -> Wish:
        return self._wish.model_copy(update={"wants": self._ways.wants_group})

    def _begin(self, begin: GroupBegin) -> GroupSaid:
        header = WeightsHeader.parse(begin.header.encode(), max_bytes=self._max_bytes)
        if (header.job, header.role, header.version) != (begin.job, begin.role, begin.version):
            raise MalformedRecord(f"its header is of {header.job}/{header.role}/{header.version}"[:200])
        with self._lock:
            self._channels.keep_only(begin.epoch)
            packed = PackedWeights(header, self._buffers.take(header.num_bytes))
            self._arriving = _Arriving(begin, packed, self._channels, self._wish)
        return GroupSaid()

    def _commit(self, commit: GroupCommit) -> GroupSaid:
        arriving = self._arriving
        if arriving is None or arriving.begin.transfer != commit.transfer:
            return GroupSaid(problem="this transfer is not under way here")
        self._arriving = None
        problem = arriving.compared(commit.digests)
        if problem:
            log.warning("weights version %d did not come by the group: %s", arriving.begin.version, problem)
            self.close()
            return GroupSaid(problem=problem[:1000])
        header = arriving.packed.header.model_copy(update={"digest": commit.digest})
        self._ways.took("group", time.monotonic() - arriving.began)
        with self._lock:
            key = (header.job, header.role, header.version, header.digest)
            self._taken = key, PackedWeights(header, arriving.packed.buffer)
        return GroupSaid()


class _Arriving:
    """One version, in memory that nobody sees: a thread for each rank of the trainer."""

    def __init__(self, begin: GroupBegin, packed: PackedWeights, channels: Channels, wish: Wish) -> None:
        self.begin = begin
        self.packed = packed
        self.began = time.monotonic()
        self._channels = channels
        self._wish = wish
        self._digests = [self._started(sender) for sender in range(begin.num_senders)]

    def compared(self, digests: list[list[str]]) -> str:
        """What is wrong; empty: every bucket is what its sender says."""
        deadline = time.monotonic() + COMMIT_SECONDS
        if len(digests) != len(self._digests):
            return f"{len(digests)} ranks sent, not {len(self._digests)}"
        for sender, (found, said) in enumerate(zip(self._digests, digests, strict=True)):
            try:
                came = found.result(max(deadline - time.monotonic(), 0))
            except (RuntimeError, FutureTimeout) as error:
                return f"of rank {sender}: {str(error) or 'not all of it came'}"
            if len(said) != len(came):
                return f"of rank {sender}: {len(said)} buckets were sent, {len(came)} came"
            for number, (one, other) in enumerate(zip(came, said, strict=True)):
                if one != other:
                    return f"bucket {number} of rank {sender} is not what was sent"
        return ""

    def _started(self, sender: int) -> Future[list[str]]:
        future: Future[list[str]] = Future()

        def run() -> None:
            try:
                future.set_result(self._received(sender))
            except (RuntimeError, OSError, ValueError) as error:  # torch's own are of the first
                future.set_exception(RuntimeError(str(error)))

        threading.Thread(target=run, name=f"weights-group-{sender}", daemon=True).start()
        return future

    def _received(self, sender: int) -> list[str]:
        begin, header = self.begin, self.packed.header
        device = self._wish.device if begin.backend == "nccl" else "cpu"
        place = Place(
            meeting=begin.meeting, epoch=begin.epoch, sender=sender, rank=begin.rank, size=begin.size,
            backend=begin.backend, host=self._wish.host, device=device,
        )  # fmt: skip
        plan = buckets(header, sender, begin.num_senders, begin.bucket_bytes)
        channel, spare = self._channels.of(place), TwoBuffers(plan, device)
        digests: list[str] = []
        under_way: list[tuple[Bucket, torch.Tensor, Callable[[float], None]]] = []

        def arrived() -> None:
            bucket, content, wait = under_way.pop(0)
            wait(BUCKET_SECONDS)
            digests.append(bucket_digest(content, name_of(header, sender, len(digests))))
            if content.device.type != "cpu" or bucket.begin is None:
                for piece in bucket.pieces:
                    part = content[piece.at : piece.at + piece.num_bytes]
                    self.packed.buffer[piece.begin : piece.begin + piece.num_bytes].copy_(part)

        for number, bucket in enumerate(plan):
            if device == "cpu" and bucket.begin is not None:
                content = self.packed.buffer[bucket.begin : bucket.begin + bucket.num_bytes]
            else:
                content = spare[number][: bucket.num_bytes]
            under_way.append((bucket, content, channel.broadcast(content)))
            if len(under_way) == 2:
                arrived()
        while under_way:
            arrived()
        return digests
