"""Rendezvous store of ranks, sealed with their secret, because torch's TCPStore is open to all.

Keys are HMACs, and values are encrypted for their key. Keep a reference to the store, which torch does not hold.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rlhfspec.common.ranks import RankTold

_SEAL_NONCE_BYTES = 12
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def opened(told: RankTold, timeout: timedelta) -> SealedStore:
    """Open the store. Rank 0 listens, on loopback only if its own address is loopback."""
    host, _, port = told.leader.rpartition(":")
    host = host.strip("[]")
    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": False}
    if told.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else torchrun listens there
        listening = _listening(host, int(port))
        options |= {"is_master": True, "master_listen_fd": listening.detach()}
    return SealedStore(TCPStore(host, int(port), told.num_ranks, **options), told.secret)


def is_here(leader: str) -> bool:
    return leader.rpartition(":")[0].strip("[]") in _LOOPBACK


def _listening(host: str, port: int) -> socket.socket:
    if host in _LOOPBACK:
        return socket.create_server((host, port), family=socket.AF_INET6 if host == "::1" else socket.AF_INET)
    if socket.has_dualstack_ipv6():  # a pod's name may not resolve yet
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class SealedStore(Store):
    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__()
        self._inner = inner
        self._secret = secret
        self._cipher = AESGCM(hmac.digest(secret, b"values", "sha256"))
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        nonce, name = os.urandom(_SEAL_NONCE_BYTES), self._name(key)
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(name, (nonce + self._cipher.encrypt(nonce, content, name.encode())).hex())

    def get(self, key: str) -> bytes:
        name = self._name(key)
        try:
            sealed = bytes.fromhex(self._inner.get(name).decode())
            return self._cipher.decrypt(sealed[:_SEAL_NONCE_BYTES], sealed[_SEAL_NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise RuntimeError("a process without the ranks' secret wrote into their store") from error

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(self._name(key), amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        self._inner.wait(names, *([] if timeout is None else [timeout]))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check([self._name(key) for key in keys]))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(self._name(key)))

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def clone(self) -> SealedStore:
        self._clones.append(SealedStore(self._inner.clone(), self._secret))
        return self._clones[-1]

    def _name(self, key: str) -> str:
        return hmac.digest(self._secret, key.encode(), "sha256").hex()


def prove(group: Any, rank: int, num_ranks: int, secret: bytes, timeout: timedelta) -> None:
    """Raise RuntimeError unless every pair of a gloo group proves that it knows the secret.

    gloo accepts any first connection, so this must precede all other messages.
    """
    own = [os.urandom(32) for _ in range(num_ranks)]
    theirs = _exchanged(own, group, rank, timeout)
    answers = [_proof(secret, rank, challenge) for challenge in theirs]
    for other, answer in enumerate(_exchanged(answers, group, rank, timeout)):
        if other != rank and not hmac.compare_digest(answer, _proof(secret, other, own[other])):
            raise RuntimeError(f"what is connected as rank {other} does not know the ranks' secret")


def _proof(secret: bytes, rank: int, challenge: bytes) -> bytes:
    return hmac.digest(secret, b"rank %d " % rank + challenge, "sha256")


def _exchanged(sent: list[bytes], group: Any, rank: int, timeout: timedelta) -> list[bytes]:
    received = [torch.zeros(32, dtype=torch.uint8) for _ in sent]
    others = [other for other in range(len(sent)) if other != rank]
    under_way = [
        work
        for other in others
        for work in (
            dist.isend(torch.frombuffer(bytearray(sent[other]), dtype=torch.uint8), group=group, group_dst=other),
            dist.irecv(received[other], group=group, group_src=other),
        )
    ]
    for work in under_way:
        assert work is not None
        work.wait(timeout)
    return [each.numpy().tobytes() for each in received]
