"""HTTPS endpoint for reports of `control`, authenticated by its service account token.

The token must belong to a live control pod that the operator made for the job.

| status | reason |
|---|---|
| 204 | accepted |
| 401 | no token, or invalid for the audience |
| 403 | token of another pod |
| 404 | unknown job |
| 413 | more than _MAX_REPORT_BYTES |
| 422 | invalid report |
| 429 | more often than every LEAST_SECONDS |
| 503 | not the leader, or no answer of the API server |
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.errors import ClusterUnavailable
from rlhfspec.operator.deciding.memory import uids_made
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.queue import Key

_MAX_REPORT_BYTES = 256 * 1024
LEAST_SECONDS = 0.5
KNOWN_SECONDS = 60.0  # cache time of a valid token
NOT_ASKED_SECONDS = 10.0  # cache time of an invalid one: its pod may be too new
MOST_KNOWN = 1000
_EXTRA = "authentication.kubernetes.io/"
Review = Callable[[str, str], Awaitable[dict[str, Any]]]  # (token, audience) -> status of a TokenReview


@dataclass(frozen=True, slots=True)
class Caller:
    namespace: str
    pod: str
    uid: str


class Reports:
    def __init__(
        self,
        cache: Cache,
        review: Review,
        tell: Callable[[Key], None],
        *,
        is_acting: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._review = review
        self._tell = tell
        self._is_acting = is_acting
        self._now = now
        self._callers: OrderedDict[bytes, tuple[Caller | None, float]] = OrderedDict()  # with expiry
        self._last: dict[Key, float] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_REPORT_BYTES)
        app.add_routes([web.post(names.report_path("{namespace}", "{job}"), self._post)])
        return app

    async def _post(self, request: web.Request) -> web.Response:
        key = (request.match_info["namespace"], request.match_info["job"])
        if not self._is_acting():
            return _no(503, "another replica of the operator is the leader")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return _no(401, "a report needs the token of a control pod: Authorization: Bearer TOKEN")
        try:
            caller = await self._caller(token.strip())
        except ClusterUnavailable as error:
            return _no(503, str(error))
        if caller is None:
            return _no(401, f"the token is not valid for the audience {names.AUDIENCE}")
        if self._cache.job(key) is None:
            return _no(404, f"there is no {names.KIND} {'/'.join(key)}")
        if not self._is_control(caller, key):
            return _no(403, f"{caller.namespace}/{caller.pod} is not the control pod of {'/'.join(key)}")
        if self._now() - self._last.get(key, float("-inf")) < LEAST_SECONDS:
            return _no(429, f"a job may report at most once every {LEAST_SECONDS} s")
        return await self._take(request, key)

    async def _take(self, request: web.Request, key: Key) -> web.Response:
        try:
            report = Report.model_validate_json(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return _no(413, f"a report may have at most {_MAX_REPORT_BYTES} bytes")
        except ValidationError as error:
            first, *_ = error.errors(include_url=False, include_input=False)
            return _no(422, f"{'.'.join(map(str, first['loc'])) or 'report'}: {first['msg']}")
        self._last[key] = self._now()
        self._cache.put_report(key, report, datetime.now(UTC))
        self._tell(key)
        return web.Response(status=204)

    async def _caller(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode()).digest()
        known = self._callers.get(digest)
        if known is not None and self._now() < known[1]:
            return known[0]
        status = await self._review(token, names.AUDIENCE)
        is_ours = status.get("authenticated") and names.AUDIENCE in status.get("audiences", ())
        caller = _caller_of(status["user"]) if is_ours else None
        self._callers[digest] = (caller, self._now() + (KNOWN_SECONDS if caller else NOT_ASKED_SECONDS))
        self._callers.move_to_end(digest)
        if len(self._callers) > MOST_KNOWN:
            self._callers.popitem(last=False)
        return caller

    def _is_control(self, caller: Caller, key: Key) -> bool:
        job = self._cache.job(key)
        is_made = job is not None and caller.namespace == key[0] and caller.uid in uids_made(job.status)
        return is_made and any(
            pod.role == names.CONTROL and (pod.name, pod.uid) == (caller.pod, caller.uid) and not pod.is_finished
            for pod in self._cache.pods(key)
        )

    def forget(self, key: Key) -> None:
        self._last.pop(key, None)


def _caller_of(user: dict[str, Any]) -> Caller | None:
    """Return the pod to which a token belongs, or None.

    >>> _caller_of({"username": "system:serviceaccount:team:rlhfspec-job", "extra": {
    ...     "authentication.kubernetes.io/pod-name": ["sums-control-0"],
    ...     "authentication.kubernetes.io/pod-uid": ["6f1c"]}})
    Caller(namespace='team', pod='sums-control-0', uid='6f1c')
    >>> _caller_of({"username": "ada"}) is None
    True
    """
    extra, (_, _, account) = user.get("extra", {}), user.get("username", "").partition("system:serviceaccount:")
    pod, uid = (extra.get(f"{_EXTRA}{field}", [""])[0] for field in ("pod-name", "pod-uid"))
    namespace, _, _ = account.partition(":")
    return Caller(namespace, pod, uid) if namespace and pod and uid else None


def _no(code: int, why: str) -> web.Response:
    return web.Response(status=code, text=f"{' '.join(why.split())}\n")
