"""Client of the API server, which retries transient failures until a deadline.

Refusals are responses, not exceptions. Every write attempt checks `may_write`, so that a former leader cannot write.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import aiohttp

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.errors import ClusterRefused, ClusterUnavailable, LeadershipLost

_P = TypeVar("_P")
_T = TypeVar("_T")
Json = dict[str, Any]
Body = Json | list[Json]
APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
PATCH = "application/json-patch+json"
ATTEMPT_SECONDS = 10.0
_WRITE_ATTEMPT_SECONDS = 35.0  # a webhook may take 30 s before the API server reports a timeout
_REQUEST_DEADLINE_SECONDS = 30.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 5.0
PAGE = 250  # objects of one page of a list
WATCH_SECONDS = 60  # a connection without data for longer is broken
CONNECTIONS = 64
OF_ONE_JOB = 4  # connections of one job, so that a hanging webhook does not take them all
# Errors of code 500 that a retry of the same request would only repeat.
_FINAL = ("failed calling webhook", "failed to create typed patch object")
JOB_VERSION = f"{names.GROUP}/{names.VERSION}"


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """HTTP status and body of a response; `message` is the reason of a refusal."""

    code: int
    body: Json = field(repr=False)

    @property
    def is_refused(self) -> bool:
        return self.code >= 400

    @property
    def is_missing(self) -> bool:
        return self.code == 404

    @property
    def is_taken(self) -> bool:
        """Return whether a create failed because the name is taken."""
        return self.code == 409 and self.body.get("reason") == "AlreadyExists"

    @property
    def is_of_another(self) -> bool:
        """Return whether `take_up` failed because the object has another owner."""
        return self.code == 422 and not self.body.get("details")  # invalid objects have details

    @property
    def may_pass(self) -> bool:
        """Return whether a retry may succeed."""
        return self.code == 429 or (self.code >= 500 and not any(said in self.message for said in _FINAL))

    @property
    def message(self) -> str:
        return " ".join(str(self.body.get("message", f"HTTP {self.code}")).split())


def path_of(version: str, kind: str, namespace: str | None = None, name: str = "") -> str:
    """Return the URL path of an object, or of its collection.

    >>> path_of("v1", "Pod", "team", "sums-trainer-0")
    '/api/v1/namespaces/team/pods/sums-trainer-0'
    >>> path_of(JOB_VERSION, "RLHFJob")
    '/apis/rlhfspec.io/v1alpha1/rlhfjobs'
    """
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{_plural(kind)}" + (f"/{name}" if name else "")


def _plural(kind: str) -> str:
    """Return the plural of a kind in URL paths.

    >>> [_plural(kind) for kind in ("Pod", "NetworkPolicy", "PriorityClass", "RLHFJob")]
    ['pods', 'networkpolicies', 'priorityclasses', 'rlhfjobs']
    """
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}es" if word.endswith("s") else f"{word}s"


class Api:
    """Client of the API server with up to `connections` (0: no limit); `deadline_seconds` 0: no retries."""

    def __init__(
        self, access: KubeAccess, *, may_write: Callable[[], bool] = lambda: True,
        count: Callable[[str, str], None] = lambda verb, kind: None, agent: str = names.FIELD_MANAGER,
        connections: int = CONNECTIONS, deadline_seconds: float = _REQUEST_DEADLINE_SECONDS,
    ) -> None:  # fmt: skip
        self._access = access
        self._may_write = may_write
        self._count = count
        self._agent = agent
        self._connections = connections
        self._deadline_seconds = deadline_seconds
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._access.tls(), limit=self._connections)
        headers = {"User-Agent": self._agent}
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def apply(self, thing: Json) -> ApiResponse:
        """Apply an object server-side, taking over conflicting fields."""
        metadata = thing["metadata"]
        path = path_of(thing["apiVersion"], thing["kind"], metadata.get("namespace"), metadata["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._write("PATCH", "apply", thing["kind"], path, thing, query, APPLY)

    async def write_status(self, namespace: str, name: str, uid: str, version: str, status: Json) -> ApiResponse:
        """Replace a job's status; the response is 409 if `uid` or the resourceVersion `version` is outdated."""
        said = {"/metadata/uid": uid, "/metadata/resourceVersion": version, "/status": status}
        patch = [{"op": "add", "path": path, "value": value} for path, value in said.items()]
        path = path_of(JOB_VERSION, names.KIND, namespace, name) + "/status"
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._write("PATCH", "patch", f"{names.KIND}Status", path, patch, query, PATCH)

    async def merge(
        self, version: str, kind: str, namespace: str, name: str, patch: Json, *, status: bool = False
    ) -> ApiResponse:
        path = path_of(version, kind, namespace, name) + ("/status" if status else "")
        return await self._write("PATCH", "merge", f"{kind}Status" if status else kind, path, patch, content=_MERGE)

    async def delete(
        self, version: str, kind: str, namespace: str, name: str, *, uid: str | None, grace_seconds: int | None
    ) -> ApiResponse:
        """Delete the object, if it still has this `uid` (None: any)."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._write("DELETE", "delete", kind, path_of(version, kind, namespace, name), body)

    async def create(self, thing: Json, *, dry_run: bool = False) -> ApiResponse:
        """Create an object, rejecting unknown fields; `dry_run` stores nothing."""
        path = path_of(thing["apiVersion"], thing["kind"], thing["metadata"].get("namespace"))
        query = {"fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return await self._write("POST", "try" if dry_run else "create", thing["kind"], path, thing, query)

    async def take_up(self, thing: Json, fields: Iterable[str]) -> ApiResponse:
        """Overwrite labels and `fields` of the existing object, if it has the same first owner."""
        metadata = thing["metadata"]
        path = path_of(thing["apiVersion"], thing["kind"], metadata.get("namespace"), metadata["name"])
        patch = [
            {"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": metadata["ownerReferences"][0]["uid"]}
        ]
        patch += [{"op": "add", "path": "/metadata/labels", "value": metadata["labels"]}]
        patch += [{"op": "add", "path": f"/{field}", "value": thing[field]} for field in fields]
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._write("PATCH", "patch", thing["kind"], path, patch, query, PATCH)

    async def test_label(self, namespace: str, kind: str, name: str, label: str, value: str) -> ApiResponse:
        """Return a refusal unless the `v1` object has this label value, without reading its data."""
        patch = [
            {"op": "test", "path": f"/metadata/labels/{label.replace('~', '~0').replace('/', '~1')}", "value": value}
        ]
        accept = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
        path, query = path_of("v1", kind, namespace, name), {"dryRun": "All"}
        return await self._ask("PATCH", path, patch, query, PATCH, headers=accept, is_write=True)

    async def evict(self, namespace: str, pod: str) -> ApiResponse:
        """Evict a pod, unless a PodDisruptionBudget forbids it."""
        metadata = {"name": pod, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        return await self._write("POST", "evict", "Pod", path_of("v1", "Pod", namespace, pod) + "/eviction", body)

    async def _write(
        self, method: str, verb: str, kind: str, path: str, body: Body,
        query: Mapping[str, str] | None = None, content: str = "application/json",
    ) -> ApiResponse:  # fmt: skip
        answer = await self._ask(method, path, body, query, content, is_write=True)
        if not answer.is_refused:
            self._count(verb, kind)
        return answer

    async def get(self, version: str, kind: str, namespace: str | None, name: str) -> ApiResponse:
        return await self._ask("GET", path_of(version, kind, namespace, name))

    async def list(
        self, version: str, kind: str, namespace: str | None, *,
        labels: str = "", fields: str = "", cached: bool = False,
    ) -> AsyncIterator[Json]:  # fmt: skip
        """Yield the objects of a kind, which may be stale if `cached`."""
        async for page in self.pages(version, kind, namespace, labels=labels, fields=fields, cached=cached):
            for item in page["items"]:
                yield item

    async def pages(
        self, version: str, kind: str, namespace: str | None, *,
        labels: str = "", fields: str = "", cached: bool = False,
    ) -> AsyncIterator[Json]:  # fmt: skip
        """Yield responses with one page of a list each; raises ClusterRefused or ClusterUnavailable."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        query |= {"resourceVersion": "0"} if cached else {"limit": str(PAGE)}
        while True:
            answer = await self._ask("GET", path_of(version, kind, namespace), query=query)
            if answer.is_refused:
                raise ClusterRefused(f"list of {kind}", answer.message)
            items = [{"apiVersion": version, "kind": kind, **item} for item in answer.body["items"]]
            yield answer.body | {"items": items}
            if not (token := answer.body["metadata"].get("continue")):
                return
            query["continue"] = token

    async def watch(
        self, version: str, kind: str, namespace: str | None, since: str, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[str, Json]]:
        """Yield (event type, object) for WATCH_SECONDS; raises ClusterUnavailable, also if version `since` is old."""
        query = {
            "watch": "true", "resourceVersion": since, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS), "labelSelector": labels, "fieldSelector": fields,
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=None, connect=ATTEMPT_SECONDS, sock_read=WATCH_SECONDS + ATTEMPT_SECONDS)
        asked, path = f"watch of {kind}", path_of(version, kind, namespace)
        try:
            async with self._request("GET", path, query, timeout) as response:
                if response.status >= 400:
                    raise ClusterRefused(asked, _answer(response.status, await response.read()).message)
                async for line in _lines(response.content):
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        raise ClusterUnavailable(asked, ApiResponse(0, change["object"]).message)
                    yield change["type"], change["object"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterUnavailable(asked, _no_answer(error)) from None

    async def log(
        self, namespace: str, pod: str, container: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield chunks of a pod's log with timestamps; raises ClusterRefused or ClusterUnavailable."""
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        query |= {} if tail is None else {"tailLines": str(tail)}
        silence = None if follow else ATTEMPT_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, connect=ATTEMPT_SECONDS, sock_read=silence)
        asked, path = f"log of {pod}", path_of("v1", "Pod", namespace, pod) + "/log"
        try:
            async with self._request("GET", path, query, timeout) as response:
                if response.status >= 400:
                    raise ClusterRefused(asked, _answer(response.status, await response.read()).message)
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ClusterUnavailable(asked, _no_answer(error)) from None

    async def review_token(self, token: str, audience: str | None = None) -> Json:
        """Return the status of a TokenReview: validity and user."""
        audiences = {} if audience is None else {"audiences": [audience]}
        return await self._review("authentication.k8s.io/v1", "TokenReview", {"token": token} | audiences)

    async def review_access(self, user: Json, attributes: Json) -> Json:
        """Return the status of a SubjectAccessReview for `user` and `attributes`."""
        asked = user | {"resourceAttributes": attributes}
        return await self._review("authorization.k8s.io/v1", "SubjectAccessReview", asked)

    async def _review(self, version: str, kind: str, spec: Json) -> Json:
        answer = await self._ask("POST", path_of(version, kind), {"apiVersion": version, "kind": kind, "spec": spec})
        if answer.is_refused:
            raise ClusterRefused(kind, answer.message)
        status: Json = answer.body["status"]
        return status

    async def lease(self, method: str, namespace: str, name: str, body: Body | None = None) -> ApiResponse:
        """Send one Lease request without retries or the `may_write` check, since the caller may not lead yet."""
        path = path_of("coordination.k8s.io/v1", "Lease", namespace, "" if method == "POST" else name)
        return await self._try(method, path, body, {}, "application/json")

    async def _ask(
        self, method: str, path: str, body: Body | None = None, query: Mapping[str, str] | None = None,
        content: str = "application/json", *, headers: Mapping[str, str] | None = None, is_write: bool = False,
    ) -> ApiResponse:  # fmt: skip
        began, wait = time.monotonic(), _FIRST_WAIT_SECONDS
        while True:
            if is_write and not self._may_write():
                raise LeadershipLost(f"{method} {path}")
            try:
                seconds = _WRITE_ATTEMPT_SECONDS if is_write else ATTEMPT_SECONDS
                answer = await self._try(method, path, body, query or {}, content, seconds, headers)
                if not answer.may_pass:
                    return answer
                problem = answer.message
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = _no_answer(error)
            if time.monotonic() - began + wait > self._deadline_seconds:
                raise ClusterUnavailable(f"{method} {path}", problem)
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _try(
        self, method: str, path: str, body: Body | None, query: Mapping[str, str], content: str,
        seconds: float = ATTEMPT_SECONDS, more: Mapping[str, str] | None = None,
    ) -> ApiResponse:  # fmt: skip
        data = None if body is None else json.dumps(body).encode()
        headers = ({"Content-Type": content} if data is not None else {}) | dict(more or {})
        timeout = aiohttp.ClientTimeout(total=seconds, connect=ATTEMPT_SECONDS)
        async with self._request(method, path, query, timeout, data=data, headers=headers) as response:
            return _answer(response.status, await response.read())

    def _request(
        self, method: str, path: str, query: Mapping[str, str], timeout: aiohttp.ClientTimeout, *,
        data: bytes | None = None, headers: Mapping[str, str] | None = None,
    ) -> aiohttp.client._RequestContextManager:  # fmt: skip
        return self._session.request(
            method, self._access.server + path, params=_said(query), timeout=timeout, data=data,
            headers=self._access.headers() | dict(headers or {}), **self._access.options(),
        )  # fmt: skip


def _said(query: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in query.items() if value}


def _no_answer(error: Exception) -> str:
    """Return why a request got no response.

    >>> _no_answer(TimeoutError())
    'no answer in time'
    """
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return "no answer in time" if isinstance(error, TimeoutError) else f"no answer: {' '.join(str(cause).split())}"


def _answer(code: int, text: bytes) -> ApiResponse:
    try:
        return ApiResponse(code, json.loads(text))
    except ValueError:  # an HTML page of a proxy
        return ApiResponse(code, {"message": text.decode(errors="replace")[:200]})


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length, since objects may exceed a megabyte."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


async def from_each(
    places: Iterable[_P], ask: Callable[[_P], Awaitable[_T]]
) -> AsyncIterator[tuple[_P, _T | ClusterRefused]]:
    """Yield each place with the result of `ask(place)`, or the ClusterRefused that it raised."""
    for place in places:
        try:
            yield place, await ask(place)
        except ClusterRefused as refused:
            yield place, refused


async def in_parallel(calls: list[Awaitable[ApiResponse]]) -> list[ApiResponse]:
    """Await all calls, OF_ONE_JOB at a time; return the responses or raise the first exception."""
    room = asyncio.Semaphore(OF_ONE_JOB)

    async def one(call: Awaitable[ApiResponse]) -> ApiResponse:
        async with room:
            return await call

    done = await asyncio.gather(*map(one, calls), return_exceptions=True)
    for each in done:
        if isinstance(each, BaseException):
            raise each
    return [each for each in done if isinstance(each, ApiResponse)]
