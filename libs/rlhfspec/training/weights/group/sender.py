"""Trainer side of weight groups: tracks members and sends versions before they are announced."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import torch.distributed as dist
from torch import Tensor

from rlhfspec.errors import MalformedRecord
from rlhfspec.messages.records import Role
from rlhfspec.training.weights.group.channel import BUCKET_SECONDS, FORM_SECONDS, Backend, Place
from rlhfspec.training.weights.group.messages import (
    GROUP_METHOD,
    GROUP_SERVICE,
    MAX_BYTES,
    MAX_MEMBERS,
    GroupAsk,
    GroupBegin,
    GroupCommit,
    GroupOrder,
    Wish,
)
from rlhfspec.training.weights.group.plan import BUCKET_BYTES, KeptAs, described
from rlhfspec.training.weights.group.receiver import COMMIT_SECONDS
from rlhfspec.training.weights.group.shares import Shares, Told
from rlhfspec.training.weights.grpc_messages import parse

_SILENT_SECONDS = 3.0  # without a poll, until a generator is dropped
_ORDER_SECONDS = 5.0
SLOWEST = 100e6  # bytes a second; a slower group is closed
MOST_RESTING = 64  # versions
log = logging.getLogger(__name__)


def hold_up_seconds(num_bytes: int) -> float:
    return _ORDER_SECONDS + _sending_seconds(num_bytes) + BUCKET_SECONDS + _ORDER_SECONDS + COMMIT_SECONDS


def _sending_seconds(num_bytes: int) -> float:
    return FORM_SECONDS + BUCKET_SECONDS + num_bytes / SLOWEST


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingRanks:
    """Trainer ranks that send. `send`: None if only this one does. `kept_as`: tensor types for a receiver's dtype."""

    num_senders: int = 1
    send: Callable[[Told], list[list[str]]] | None = None
    kept_as: Callable[[str], KeptAs] = lambda _: lambda _: None


ONE_RANK = SendingRanks()


@dataclass(frozen=True, slots=True)
class _Member:
    wish: Wish
    asked: float


class GroupSender:
    """Sender of versions to member generators. `host`: own address. `askers`: roles that may poll, None for all."""

    def __init__(
        self,
        job: str,
        *,
        host: str,
        device: str = "cpu",
        askers: Collection[str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._job = job
        self._host = host
        self._device = device
        self._askers = askers
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Condition()
        self._members: dict[str, _Member] = {}
        self._num_told = 0  # number of members last logged
        self._orders: dict[str, GroupOrder] = {}  # not answered yet
        self._said: dict[str, str] = {}  # their results
        self._epoch, self._epoch_of = "", frozenset[str]()
        self._num_failures = self._num_resting = 0
        self._shares = Shares()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host.strip("[]"), 0), family=family)
        self._meeting = f"{host}:{self._listening.getsockname()[1]}"
        distributed: Any = dist
        self._store = distributed.TCPStore(
            host.strip("[]"), self._listening.getsockname()[1], is_master=True, wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )  # fmt: skip

    def add_to(self, server: grpc.Server) -> None:
        method = grpc.unary_unary_rpc_method_handler(self._answer)  # raw bytes, without serializers
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GROUP_SERVICE, {GROUP_METHOD: method}),))

    def close(self) -> None:
        self._shares.close()

    @property
    def members(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._still_in())

    def begin(
        self, role: Role, version: int, weights: Mapping[str, Tensor], ranks: SendingRanks = ONE_RANK
    ) -> VersionUnderWay | None:
        """Start sending in a thread, or return None if the group is unused. Tensors must not change until `end`."""
        with self._lock:
            members = dict(self._still_in())
        if not members or len(members) >= MAX_MEMBERS:
            return None
        if self._num_resting > 0:
            self._num_resting -= 1
            return None
        if self._epoch_of != members.keys() or not self._epoch:
            self._epoch, self._epoch_of = secrets.token_hex(8), frozenset(members)
        wishes = [member.wish for member in members.values()]
        dtypes = {wish.dtype for wish in wishes}
        kept_as = ranks.kept_as(dtypes.pop() if len(dtypes) == 1 else "")
        header = described(self._job, role, version, weights, kept_as)
        on_gpus = self._device.startswith("cuda") and all(wish.device.startswith("cuda") for wish in wishes)
        backend: Backend = "nccl" if on_gpus else "gloo"
        place = Place(
            meeting=self._meeting, epoch=self._epoch, sender=0, rank=0, size=len(members) + 1, backend=backend,
            host=self._host, device=self._device if on_gpus else "cpu",
        )  # fmt: skip
        told = Told(
            place=place, header=header, num_senders=ranks.num_senders, bucket_bytes=self._bucket_bytes,
            deadline_seconds=_sending_seconds(header.num_bytes),
        )  # fmt: skip
        send = ranks.send or (lambda told: [self._shares.send(told, weights)])
        return VersionUnderWay(self, told, send, sorted(members))

    def tell_all(self, orders: Mapping[str, GroupOrder], seconds: float) -> None:
        """Send orders by member address and wait for results. Raise RuntimeError if a member fails or times out."""
        with self._lock:
            self._orders, self._said = dict(orders), {}
            self._lock.wait_for(lambda: not self._orders, seconds)
            unanswered, self._orders = self._orders, {}
            said = self._said | dict.fromkeys(unanswered, f"has not answered in {seconds:g} s")
        for address in orders:
            if said[address]:
                raise RuntimeError(f"{address}: {said[address]}")

    def worked(self) -> None:
        self._num_failures = 0

    def failed(self) -> None:
        """Reset membership after a failure. Repeated failures leave the group unused for more versions."""
        self._shares.close()
        with self._lock:
            self._epoch, self._members = "", {}
        self._num_failures += 1
        self._num_resting = min(2 ** (self._num_failures - 1) - 1, MOST_RESTING)

    def _answer(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        names = {name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", [])}
        if self._askers is not None and names.isdisjoint(self._askers):
            known = ", ".join(sorted(names)) or "a client without a certificate"
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{known} may not join the group")
        try:
            ask = parse(GroupAsk, content)
        except MalformedRecord as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("refused") from None
        return self._told(ask).model_dump_json().encode()

    def _told(self, ask: GroupAsk) -> GroupOrder:
        with self._lock:
            order = self._orders.get(ask.member)
            if order is not None and ask.said is not None and ask.said.order == order.order:
                self._ended(ask.member, ask.said.problem)
            if ask.wish.wants:
                self._members[ask.member] = _Member(ask.wish, time.monotonic())
            elif self._members.pop(ask.member, None) is not None and ask.member in self._orders:
                self._ended(ask.member, "has left")
            self._still_in()
            return self._orders.get(ask.member, GroupOrder())

    def _ended(self, address: str, problem: str) -> None:
        del self._orders[address]
        self._said[address] = problem
        self._lock.notify_all()

    def _still_in(self) -> dict[str, _Member]:
        """Return members that polled recently. The caller must hold the lock."""
        since = time.monotonic() - _SILENT_SECONDS
        self._members = {address: member for address, member in self._members.items() if member.asked > since}
        if len(self._members) != self._num_told:
            self._num_told = len(self._members)
            log.info("weights: %d generators want them by group", self._num_told)
        return self._members


class VersionUnderWay:
    """Transfer of one version. Call `end` once its digest is known, or `give_up_unless_ended`."""

    def __init__(
        self, sender: GroupSender, told: Told, send: Callable[[Told], list[list[str]]], members: list[str]
    ) -> None:
        self._sender = sender
        self._told = told
        self._members = members
        self._transfer = secrets.token_hex(8)
        self._began = time.monotonic()
        self._digests: list[list[str]] = []
        self._problem = ""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, args=(send,), name="weights-sending", daemon=True)
        self._thread.start()

    def end(self, digest: str) -> str:
        """Wait for the transfer, commit it on all members, and return the problem, or "" on success."""
        self._thread.join()
        self._has_ended = True
        if not self._problem:
            commit = GroupCommit(transfer=self._transfer, digest=digest, digests=self._digests)
            order = GroupOrder(order=secrets.token_hex(8), commit=commit)
            try:
                self._sender.tell_all(dict.fromkeys(self._members, order), _ORDER_SECONDS + COMMIT_SECONDS)
            except RuntimeError as error:
                self._problem = str(error)
        seconds, version = time.monotonic() - self._began, self._told.header.version
        if self._problem:
            self._sender.failed()
            problem = self._problem.splitlines()[0]
            log.warning(
                "weights version %d goes by the store: the group failed after %.1f s: %s", version, seconds, problem
            )
        else:
            self._sender.worked()
            num_bytes = self._told.header.num_bytes
            log.info("weights version %d went to %d generators by group in %.3f s", version, len(self._members),
                     seconds, extra={"fields": {"bytes": num_bytes, "seconds": seconds}})  # fmt: skip
        return self._problem

    def give_up_unless_ended(self) -> None:
        if not self._has_ended:
            self._thread.join()
            self._sender.failed()

    def _run(self, send: Callable[[Told], list[list[str]]]) -> None:
        try:
            self._sender.tell_all(self._beginnings(), _ORDER_SECONDS)
            self._digests = send(self._told)
        except RuntimeError as error:  # includes torch's own errors
            self._problem = str(error)

    def _beginnings(self) -> dict[str, GroupOrder]:
        told, header = self._told, self._told.header.model_dump_json()
        if len(header) > MAX_BYTES:
            raise RuntimeError(f"names and shapes take {len(header)} bytes, more than {MAX_BYTES}")
        order = secrets.token_hex(8)
        return {
            address: GroupOrder(order=order, begin=GroupBegin(
                job=told.header.job, role=told.header.role, version=told.header.version, transfer=self._transfer,
                epoch=told.place.epoch, meeting=told.place.meeting, rank=number, size=told.place.size,
                num_senders=told.num_senders, bucket_bytes=told.bucket_bytes, backend=told.place.backend,
                header=header,
            ))
            for number, address in enumerate(self._members, start=1)
        }  # fmt: skip
