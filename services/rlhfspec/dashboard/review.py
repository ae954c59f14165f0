"""Which users may look in a cluster: the API server says whose a token is (TokenReview), and what that user may
(SubjectAccessReview), in each namespace anew. Answers count for some seconds."""

from __future__ import annotations

import asyncio
import hashlib

from rlhfspec.cluster import names
from rlhfspec.dashboard.access import Visitor, What
from rlhfspec.dashboard.jobs.api_server import ApiServer
from rlhfspec.dashboard.jobs.kept import Kept
from rlhfspec.messages.transport.clock import Clock

_COUNTS_SECONDS = (
    10.0  # and an open page is asked about every server.BEAT_SECONDS: together how long a lost right lasts
)
_MOST_AT_ONCE = 16  # reviews: a flood of wrong tokens is no flood for the API server
_ASKED: dict[What, dict[str, str]] = {
    "jobs": {"group": names.GROUP, "resource": names.PLURAL, "verb": "get"},
    # What a sample says may also stand in the logs of a pod: a user who may read these may read samples. And what a
    # process said last, in its pod's status, is the end of its log.
    "texts": {"group": "", "resource": "pods", "subresource": "log", "verb": "get"},
}


class ClusterAccess:
    is_local = False

    def __init__(self, server: ApiServer, *, clock: Clock | None = None) -> None:
        self._server = server
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
            user = await self._server.review_token(token)
        if user is None:
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
            return await self._server.review_access(user, {"namespace": namespace, **_ASKED[what]})
