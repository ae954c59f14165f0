"""Generator side of weight groups: polls for orders, receives versions and checks their digests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import suppress

import grpc
import torch

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Weights
from rlhfspec.training.weights.group.channel import BUCKET_SECONDS, Channels, Place, TwoBuffers, name_of
from rlhfspec.training.weights.group.messages import (
    GROUP_METHOD,
    GROUP_SERVICE,
    MAX_ORDER_BYTES,
    GroupAsk,
    GroupBegin,
    GroupCommit,
    GroupOrder,
    GroupSaid,
    Wish,
)
from rlhfspec.training.weights.group.plan import Bucket, bucket_digest, buckets
from rlhfspec.training.weights.group.ways import Ways
from rlhfspec.training.weights.grpc_client import OPTIONS, channel_to
from rlhfspec.training.weights.grpc_messages import parse
from rlhfspec.training.weights.packed import Buffers, PackedWeights, WeightsHeader, machine_memory

COMMIT_SECONDS = 5.0  # for pending buckets when the sender has sent all
_POLL_TRAINER_SECONDS = 0.1
_TRAINER_CALL_SECONDS = 2.0
_OPTIONS = (*OPTIONS, ("grpc.max_reconnect_backoff_ms", 1000))
log = logging.getLogger(__name__)


class GroupReceiver:
    """Receiver of weights by group, while `ways` prefers this to the store.

    `address`: this process's. `trainer_address`: the trainer's gRPC address, None while unknown.
    """

    def __init__(
        self,
        wish: Wish,
        ways: Ways,
        *,
        address: str,
        trainer_address: Callable[[], str | None],
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str | None = None,
    ) -> None:
        self._wish = wish
        self._ways = ways
        self._address = address
        self._trainer_address = trainer_address
        self._credentials = credentials
        self._server_name = server_name
        self._max_bytes = machine_memory()
        self._lock = threading.Lock()
        self._buffers = Buffers()
        self._channels = Channels()
        self._arriving: _Arriving | None = None
        self._taken: tuple[tuple[str, str, int, str], PackedWeights] | None = None
        self._closed = threading.Event()
        self._trainer: tuple[str, grpc.Channel] | None = None
        self._asking = threading.Thread(target=self._run, name="weights-group", daemon=True)
        self._asking.start()

    def take(self, record: Weights) -> dict[str, torch.Tensor] | None:
        with self._lock:
            if self._taken is None or self._taken[0] != (record.job, record.role, record.version, record.digest):
                return None
            return self._taken[1].tensors()

    def close(self) -> None:
        """Leave the group and notify the trainer, so that it does not wait."""
        self._closed.set()
        self._asking.join(_TRAINER_CALL_SECONDS)
        self._channels.close()

    def _run(self) -> None:
        said: GroupSaid | None = None
        while True:
            order = self._ask(said)
            if order is not None:
                said = self._done(order)
            if (order is None or said is None) and self._closed.wait(_POLL_TRAINER_SECONDS):
                break
        self._ask(None)
        self._forget_trainer()

    def _ask(self, said: GroupSaid | None) -> GroupOrder | None:
        """Report the last order's result `said` and return the next order. After None (no reply), report it again."""
        address = self._trainer_address()
        if address is None:
            return None
        wants = self._ways.wants_group and not self._closed.is_set()
        wish = self._wish.model_copy(update={"wants": wants})
        ask = GroupAsk(member=self._address, wish=wish, said=said)
        if self._trainer is None or self._trainer[0] != address:
            self._forget_trainer()
            self._trainer = address, channel_to(address, self._credentials, self._server_name, _OPTIONS)
        call = self._trainer[1].unary_unary(f"/{GROUP_SERVICE}/{GROUP_METHOD}")
        with suppress(grpc.RpcError, MalformedRecord):
            answer = call(ask.model_dump_json().encode(), timeout=_TRAINER_CALL_SECONDS)
            return parse(GroupOrder, answer, MAX_ORDER_BYTES)
        return None

    def _forget_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer[1].close()
            self._trainer = None

    def _done(self, order: GroupOrder) -> GroupSaid | None:
        if order.begin is None and order.commit is None:
            return None
        try:
            problem = self._begin(order.begin) if order.begin is not None else ""
            problem = problem or (self._commit(order.commit) if order.commit is not None else "")
        except (MalformedRecord, RuntimeError, MemoryError) as error:  # torch's own errors are RuntimeErrors
            problem = str(error)
        return GroupSaid(order=order.order, problem=problem[:1000])

    def _begin(self, begin: GroupBegin) -> str:
        header = WeightsHeader.parse(begin.header.encode(), max_bytes=self._max_bytes)
        if (header.job, header.role, header.version) != (begin.job, begin.role, begin.version):
            return f"its header is of {header.job}/{header.role}/{header.version}"
        self._channels.keep_only(begin.epoch)
        packed = PackedWeights(header, self._buffers.take(header.num_bytes))
        self._arriving = _Arriving(begin, packed, self._channels, self._wish.device, self._address)
        return ""

    def _commit(self, commit: GroupCommit) -> str:
        arriving = self._arriving
        if arriving is None or arriving.begin.transfer != commit.transfer:
            return "this transfer is not under way here"
        self._arriving = None
        if problem := arriving.compared(commit.digests):
            log.warning("weights version %d did not arrive by the group: %s", arriving.begin.version, problem)
            self._channels.close()
            return problem
        header = arriving.packed.header.model_copy(update={"digest": commit.digest})
        self._ways.took("group", time.monotonic() - arriving.began)
        with self._lock:
            key = (header.job, header.role, header.version, header.digest)
            self._taken = key, PackedWeights(header, arriving.packed.buffer)
        return ""


class _Arriving:
    def __init__(self, begin: GroupBegin, packed: PackedWeights, channels: Channels, device: str, address: str) -> None:
        self.begin = begin
        self.packed = packed
        self.began = time.monotonic()
        self._channels = channels
        self._device = device
        self._host = address.rpartition(":")[0].strip("[]")
        self._digests = [self._started(sender) for sender in range(begin.num_senders)]

    def compared(self, digests: list[list[str]]) -> str:
        """Compare received buckets with the senders' digests. Return the problem, or ""."""
        deadline = time.monotonic() + COMMIT_SECONDS
        if len(digests) != len(self._digests):
            return f"{len(digests)} ranks sent, not {len(self._digests)}"
        for sender, (found, said) in enumerate(zip(self._digests, digests, strict=True)):
            try:
                came = found.result(max(deadline - time.monotonic(), 0))
            except (RuntimeError, FutureTimeout) as error:
                return f"rank {sender}: {str(error) or 'not all of it came'}"
            if len(said) != len(came):
                return f"rank {sender}: {len(said)} buckets were sent, {len(came)} came"
            for number, (one, other) in enumerate(zip(came, said, strict=True)):
                if one != other:
                    return f"bucket {number} of rank {sender} is not what was sent"
        return ""

    def _started(self, sender: int) -> Future[list[str]]:
        future: Future[list[str]] = Future()

        def run() -> None:
            try:
                future.set_result(self._received(sender))
            except (RuntimeError, OSError, ValueError) as error:  # torch's own errors are RuntimeErrors
                future.set_exception(RuntimeError(str(error)))

        threading.Thread(target=run, name=f"weights-group-{sender}", daemon=True).start()
        return future

    def _received(self, sender: int) -> list[str]:
        begin, header = self.begin, self.packed.header
        device = self._device if begin.backend == "nccl" else "cpu"
        place = Place(
            meeting=begin.meeting, epoch=begin.epoch, sender=sender, rank=begin.rank, size=begin.size,
            backend=begin.backend, host=self._host, device=device,
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
