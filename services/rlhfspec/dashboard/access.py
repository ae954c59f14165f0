"""Access control of the dashboard, by a token in a cookie that scripts cannot read.

`LaptopAccess` accepts one random token from the printed URL. `ClusterAccess` asks the API server.

    >>> token_of({"Authorization": "Bearer abc"}, ""), token_of({}, "abc"), token_of({}, "")
    ('abc', 'abc', '')
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhfspec.cluster import names
from rlhfspec.dashboard.jobs.kept import Kept
from rlhfspec.messages.transport.clock import Clock

if TYPE_CHECKING:
    from rlhfspec.cluster.api import Api

MOST_TOKEN_CHARACTERS = 16_384
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")

# jobs: with curves and pods; texts: prompts, responses and last words of processes
What = Literal["jobs", "texts"]
_COUNTS_SECONDS = 10.0  # of a cached answer; a lost right lasts this plus server.KEEP_ALIVE_SECONDS
_MOST_AT_ONCE = 16  # reviews, so that wrong tokens do not flood the API server
_ASKED: dict[What, dict[str, str]] = {
    "jobs": {"group": names.GROUP, "resource": names.PLURAL, "verb": "get"},
    # Pod logs may contain sample texts and end with the last words, so the right to read logs covers both.
    "texts": {"group": "", "resource": "pods", "subresource": "log", "verb": "get"},
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """Authenticated user of the dashboard."""

    name: str
    key: str  # a hash of the token
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Access(Protocol):
    """Access policy. Raises ClusterUnavailable if it cannot decide, so that no visitor is admitted."""

    is_local: bool  # serves only this machine's host names, and cookies need no TLS

    async def visitor(self, token: str) -> Visitor | None:
        """Return the visitor of a token, or None if it is invalid."""
        ...

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool: ...


class LaptopAccess:
    is_local = True

    def __init__(self, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)

    async def visitor(self, token: str) -> Visitor | None:
        same = hmac.compare_digest(token.encode(), self.token.encode())
        return Visitor("you", "laptop") if same else None

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool:
        return True


class ClusterAccess:
    """Access policy of the API server: TokenReview for identity, SubjectAccessReview for rights per namespace."""

    is_local = False

    def __init__(self, api: Api, *, clock: Clock | None = None) -> None:
        self._api = api
        self._visitors: Kept[Visitor | None] = Kept(seconds=_COUNTS_SECONDS, clock=clock)
        self._rights: Kept[bool] = Kept(seconds=_COUNTS_SECONDS, most=20_000, clock=clock)
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)

    async def visitor(self, token: str) -> Visitor | None:
        key = hashlib.sha256(token.encode()).hexdigest()
        return await self._visitors.get(key, lambda: self._whose(token, key))

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool:
        return await self._rights.get((visitor.key, namespace, what), lambda: self._asked(visitor, namespace, what))

    async def _whose(self, token: str, key: str) -> Visitor | None:
        async with self._at_once:
            status = await self._api.review_token(token)
        user: dict[str, Any] = status.get("user") or {}
        if not user or not status.get("authenticated"):
            return None
        return Visitor(
            name=user.get("username") or "",
            key=key,
            groups=tuple(user.get("groups") or ()),
            uid=user.get("uid") or "",
            extra=tuple((name, tuple(values)) for name, values in sorted((user.get("extra") or {}).items())),
        )

    async def _asked(self, visitor: Visitor, namespace: str, what: What) -> bool:
        user = {
            "user": visitor.name,
            "groups": list(visitor.groups),
            "uid": visitor.uid,
            "extra": {name: list(values) for name, values in visitor.extra},
        }
        async with self._at_once:
            status = await self._api.review_access(user, {"namespace": namespace, **_ASKED[what]})
        return bool(status.get("allowed")) and not status.get("denied")


def token_of(headers: Mapping[str, str], cookie: str) -> str:
    """Return the token in the bearer header, else in the cookie, or "" without any."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    token = given.strip() if kind.lower() == "bearer" else cookie
    return token if is_token(token) else ""


def is_token(text: str) -> bool:
    return len(text) <= MOST_TOKEN_CHARACTERS and _TOKEN.fullmatch(text) is not None
