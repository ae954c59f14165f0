"""The trainer's side: knows which generators are in, and brings them versions before they are announced.

A version is held up for no longer than `hold_up_seconds` of its size, whatever generators do; what they did not get
they take from the store. Then the group is no more, and the next version has another, of all that still answer.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import torch.distributed as dist
from torch import Tensor

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Role
from rlhfspec.training.weights.group.channel import BUCKET_SECONDS, FORM_SECONDS, Backend, Place
from rlhfspec.training.weights.group.messages import (
    GROUP_SERVICE,
    MAX_BYTES,
    MAX_MEMBERS,
    GroupAsk,
    GroupBegin,
    GroupCommit,
    GroupSaid,
    Wish,
)
from rlhfspec.training.weights.group.plan import BUCKET_BYTES, KeptAs, described
from rlhfspec.training.weights.group.receiver import COMMIT_SECONDS
from rlhfspec.training.weights.group.shares import Shares, Told
from rlhfspec.training.weights.grpc_client import channel_to
from rlhfspec.training.weights.grpc_messages import WeightsMessage, parse

LOOK_SECONDS = 1.0
_ASK_SECONDS = 2.0
_CALL_SECONDS = 5.0
SLOWEST = 100e6  # bytes a second; a group that is slower is given up
MOST_RESTING = 64  # versions
log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=WeightsMessage)
Send = Callable[[Told, Mapping[str, Tensor]], list[list[str]]]


def hold_up_seconds(num_bytes: int) -> float:
    """The most that a version waits for its group.

    >>> hold_up_seconds(0), hold_up_seconds(16 * 10**9)
    (40.0, 200.0)
    """
    return _CALL_SECONDS + _sending_seconds(num_bytes) + BUCKET_SECONDS + _CALL_SECONDS + COMMIT_SECONDS


def _sending_seconds(num_bytes: int) -> float:
    """Until the last bucket has to be under way."""
    return FORM_SECONDS + BUCKET_SECONDS + num_bytes / SLOWEST


class GroupSender:
    """`host`: where generators reach this process. `peers`: addresses of their gRPC servers. `kept_as`: for a type that
    a generator keeps weights in, which of them it does. `send`: by all ranks of the trainer; usually by this one."""

    def __init__(
        self,
        job: str,
        *,
        host: str,
        peers: Callable[[], Iterable[str]],
        device: str = "cpu",
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._job = job
        self._host = host
        self._peers = peers
        self._device = device
        self._credentials = credentials
        self._server_name = server_name
        self._bucket_bytes = bucket_bytes
        self._members: dict[str, Wish] = {}
        self._epoch, self._epoch_of = "", frozenset[str]()
        self._num_failures = self._num_resting = 0
        self._closed = threading.Event()
        self._channels: dict[str, grpc.Channel] = {}
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="weights-group")
        self._shares = Shares()
        self._listening = socket.create_server((host.strip("[]"), 0), family=_family(host))
        self._meeting = f"{host}:{self._listening.getsockname()[1]}"
        distributed: Any = dist
        self._store = distributed.TCPStore(
            host.strip("[]"), self._listening.getsockname()[1], is_master=True, wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )  # fmt: skip
        self.kept_as: Callable[[str], KeptAs] = lambda _: lambda _: None
        self.num_senders = 1
        self.send: Send = lambda told, weights: [self._shares.send(told, weights)]
        self._looking = threading.Thread(target=self._look, name="weights-members", daemon=True)
        self._looking.start()

    def close(self) -> None:
        self._closed.set()
        self._looking.join(_ASK_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._shares.close()
        for channel in list(self._channels.values()):
            channel.close()

    @property
    def members(self) -> frozenset[str]:
        """Addresses of those that want the next version by the group."""
        return frozenset(self._members)

    def begin(self, role: Role, version: int, weights: Mapping[str, Tensor]) -> VersionUnderWay | None:
        """Sends, in a thread of its own; None where nobody wants it. The tensors must stay as they are until `end`."""
        members = dict(self._members)
        if not members or len(members) >= MAX_MEMBERS:
            return None
        if self._num_resting > 0:
            self._num_resting -= 1
            return None
        if self._epoch_of != members.keys() or not self._epoch:
            self._epoch, self._epoch_of = secrets.token_hex(8), frozenset(members)
        dtypes = {wish.dtype for wish in members.values()}
        kept_as = self.kept_as(dtypes.pop() if len(dtypes) == 1 else "")
        header = described(self._job, role, version, weights, kept_as)
        on_gpus = self._device.startswith("cuda") and all(wish.device.startswith("cuda") for wish in members.values())
        backend: Backend = "nccl" if on_gpus else "gloo"
        place = Place(
            meeting=self._meeting, epoch=self._epoch, sender=0, rank=0, size=len(members) + 1, backend=backend,
            host=self._host, device=self._device if on_gpus else "cpu",
        )  # fmt: skip
        told = Told(
            place=place, header=header, num_senders=self.num_senders, bucket_bytes=self._bucket_bytes,
            deadline_seconds=_sending_seconds(header.num_bytes),
        )  # fmt: skip
        return VersionUnderWay(self, told, weights, sorted(members))

    def call(self, address: str, message: WeightsMessage, answer: type[_M], seconds: float) -> _M:
        """MalformedRecord and grpc.RpcError."""
        if address not in self._channels:
            self._channels[address] = channel_to(address, self._credentials, self._server_name)
        ask = self._channels[address].unary_unary(f"/{GROUP_SERVICE}/{type(message).__name__}")
        return parse(answer, ask(message.model_dump_json().encode(), timeout=seconds))

    def tell_all(self, messages: Mapping[str, WeightsMessage], seconds: float) -> None:
        """RuntimeError with the first that does not answer, or says what is wrong."""

        def tell(address: str) -> str:
            try:
                return self.call(address, messages[address], GroupSaid, seconds).problem
            except (grpc.RpcError, MalformedRecord) as error:
                return _brief(error)

        for address, problem in zip(messages, self._pool.map(tell, messages), strict=True):
            if problem:
                raise RuntimeError(f"{address}: {problem}")

    def worked(self) -> None:
        self._num_failures = 0

    def failed(self) -> None:
        """Everybody has to answer anew; the more often it fails, the more versions go without."""
        self._shares.close()
        self._epoch, self._members = "", {}
        self._num_failures += 1
        self._num_resting = min(2 ** (self._num_failures - 1) - 1, MOST_RESTING)

    def _look(self) -> None:
        known = 0
        while not self._closed.is_set():
            for address, wish in zip(peers := list(self._peers()), self._pool.map(self._asked, peers), strict=True):
                if wish is not None and wish.wants:
                    self._members[address] = wish
                else:
                    self._members.pop(address, None)
            for gone in self._members.keys() - set(peers):
                self._members.pop(gone, None)
            if len(self._members) != known:
                known = len(self._members)
                log.info("weights: %d generators want them by group", known)
            self._closed.wait(LOOK_SECONDS)

    def _asked(self, address: str) -> Wish | None:
        with suppress(grpc.RpcError, MalformedRecord, ValueError):  # a channel that is closed
            return self.call(address, GroupAsk(job=self._job), Wish, _ASK_SECONDS)
        return None


class VersionUnderWay:
    """One version under way. `end` it once its digest is known, or `give_up_unless_ended`."""

    def __init__(self, sender: GroupSender, told: Told, weights: Mapping[str, Tensor], members: list[str]) -> None:
        self._sender = sender
        self._told = told
        self._members = members
        self._transfer = secrets.token_hex(8)
        self._began = time.monotonic()
        self._digests: list[list[str]] = []
        self._problem = ""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, args=(weights,), name="weights-sending", daemon=True)
        self._thread.start()

    def end(self, digest: str) -> str:
        """Whether all have it: empty, or what went wrong."""
        self._thread.join()
        self._has_ended = True
        if not self._problem:
            commit = GroupCommit(transfer=self._transfer, digest=digest, digests=self._digests)
            try:
                self._sender.tell_all(dict.fromkeys(self._members, commit), _CALL_SECONDS + COMMIT_SECONDS)
            except RuntimeError as error:
                self._problem = str(error)
        seconds, version = time.monotonic() - self._began, self._told.header.version
        if self._problem:
            self._sender.failed()
            problem = self._problem.splitlines()[0]
            log.warning("weights version %d goes by the store: after %.1f s: %s", version, seconds, problem)
        else:
            self._sender.worked()
            num_bytes = self._told.header.num_bytes
            log.info("weights version %d went to %d by group in %.3f s", version, len(self._members), seconds,
                     extra={"fields": {"bytes": num_bytes, "seconds": seconds}})  # fmt: skip
        return self._problem

    def give_up_unless_ended(self) -> None:
        if not self._has_ended:
            self._thread.join()
            self._sender.failed()

    def _run(self, weights: Mapping[str, Tensor]) -> None:
        try:
            self._sender.tell_all(self._beginnings(), _CALL_SECONDS)
            self._digests = self._sender.send(self._told, weights)
        except RuntimeError as error:  # torch's own, also
            self._problem = str(error)

    def _beginnings(self) -> dict[str, WeightsMessage]:
        told, header = self._told, self._told.header.model_dump_json()
        if len(header) > MAX_BYTES:
            raise RuntimeError(f"names and shapes take {len(header)} bytes, more than {MAX_BYTES}")
        return {
            address: GroupBegin(
                job=told.header.job, role=told.header.role, version=told.header.version, transfer=self._transfer,
                epoch=told.place.epoch, meeting=told.place.meeting, rank=number, size=told.place.size,
                num_senders=told.num_senders, bucket_bytes=told.bucket_bytes, backend=told.place.backend,
                header=header,
            )
            for number, address in enumerate(self._members, start=1)
        }  # fmt: skip


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _brief(error: Any) -> str:
    return f"{error.code().name.lower()}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
