"""Read-only HTTP server of the dashboard: a page, JSON data and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import yaml
from aiohttp import web

from rlhfspec.common.web import HEADERS, StaticFiles, tagged
from rlhfspec.dashboard.access import Access, Visitor, What, is_token, token_of
from rlhfspec.dashboard.jobs.source import JobHead, JobKey, JobSource
from rlhfspec.dashboard.live.feed import Feeds
from rlhfspec.dashboard.live.readers import EventStream, Reader, encoded
from rlhfspec.errors import ClusterUnavailable, InvalidRequest, RLHFSpecError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEEP_ALIVE_SECONDS = 15.0
_SLOW_READER_SECONDS = 10.0  # a slower reader is disconnected
_JOB_LIST_SECONDS = 1.0
MOST_STREAMS = 500
MOST_STREAMS_OF_ONE = 20  # per visitor, over all tokens
OF_LOGS = ("samples", "last_words")  # events for users who may read logs
STATIC = {
    "index.html": "text/html",
    "login.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
}
log = logging.getLogger("rlhfspec.dashboard")


class Dashboard:
    """Dashboard application. The caller serves `app()`."""

    def __init__(self, source: JobSource, access: Access) -> None:
        self.feeds = Feeds(source)
        self._source = source
        self._access = access
        self._streams: Counter[str] = Counter()  # by name of the visitor
        self._files = StaticFiles("rlhfspec.dashboard", STATIC)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 10)
        job = "/api/jobs/{namespace}/{name}"
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/login", self._login_page),
                web.post("/login", self._login),
                web.post("/logout", self._logout),
                web.get("/static/{name}", self._file),
                web.get("/healthz", self._healthy),
                web.get("/api/jobs", self._jobs),
                web.get("/api/events", self._jobs_stream),
                web.get(f"{job}/events", self._job_stream),
                web.get(f"{job}/yaml", self._yaml),
                web.get(f"{job}/samples", self._samples),
                web.get(f"{job}/sample", self._sample),
            ]
        )
        app.on_shutdown.append(self._closing)
        return app

    async def _closing(self, _: web.Application) -> None:
        await self.feeds.close()
        await self._source.close()

    # --- access --------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._refuse_strangers(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _plain(error.status, error.text or error.reason, error.headers.get("Location"))
        except InvalidRequest as error:
            response = _plain(404, str(error))
        except RLHFSpecError as error:
            response = _plain(503, str(error))
        if not response.prepared:
            response.headers.update(HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")
        return response

    def _refuse_strangers(self, request: web.Request) -> None:
        """Refuse cross-site requests except links, and on a laptop requests for other host names."""
        site = request.headers.get("Sec-Fetch-Site", "")
        is_link = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        if site not in ("same-origin", "none", "") and not (is_link and not request.path.startswith("/api/")):
            raise web.HTTPForbidden(text="requests from other sites are refused")
        origin = request.headers.get("Origin", "null")
        if not site and origin != "null" and origin.partition("://")[2] != request.headers.get("Host"):
            raise web.HTTPForbidden(text="requests from other sites are refused")
        host = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
        if self._access.is_local and host not in ("127.0.0.1", "localhost", "[::1]"):
            raise web.HTTPForbidden(text="requests from other machines are refused: open http://127.0.0.1")

    async def _visitor(self, request: web.Request) -> Visitor:
        token = token_of(request.headers, request.cookies.get(_cookie(request), ""))
        visitor = await self._access.visitor(token) if token else None
        if visitor is None:
            raise web.HTTPUnauthorized(text="log in first")
        return visitor

    async def _allowed(self, request: web.Request, what: What) -> tuple[Visitor, JobKey]:
        visitor = await self._visitor(request)
        key = JobKey(request.match_info["namespace"], request.match_info["name"])
        if not await self._access.may(visitor, key.namespace, what):
            lacks = "get rlhfjobs" if what == "jobs" else "get pods/log (needed to read samples)"
            raise web.HTTPForbidden(text=f"{visitor.name} may not {lacks} in namespace {key.namespace}")
        return visitor, key

    # --- pages ---------------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if (token := request.query.get("token")) is not None and self._access.is_local:
            return await self._entered(request, token)
        try:
            await self._visitor(request)
        except web.HTTPUnauthorized:
            raise web.HTTPSeeOther("/login") from None
        return self._files.answer(request, "index.html")

    async def _login_page(self, request: web.Request) -> web.StreamResponse:
        return self._files.answer(request, "login.html")

    async def _login(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        return await self._entered(request, str(form.get("token", "")).strip())

    async def _entered(self, request: web.Request, token: str) -> web.StreamResponse:
        if not is_token(token) or await self._access.visitor(token) is None:
            return _plain(303, "", "/login#refused")
        response = _plain(303, "", "/")
        secure = not self._access.is_local
        response.set_cookie(_cookie(request), token, httponly=True, secure=secure, samesite="Strict", path="/")
        return response

    async def _logout(self, request: web.Request) -> web.StreamResponse:
        response = _plain(303, "", "/login")
        response.del_cookie(_cookie(request), path="/")
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return self._files.answer(request, request.match_info["name"])

    async def _healthy(self, _: web.Request) -> web.StreamResponse:
        return _plain(200, "ok")

    # --- data ----------------------------------------------------------------------------------------------------

    async def _jobs(self, request: web.Request) -> web.StreamResponse:
        rows = await self._visible(await self._visitor(request))
        return tagged(request, encoded(rows).encode(), "application/json")

    async def _visible(self, visitor: Visitor) -> list[dict[str, Any]]:
        jobs = await self._source.jobs()
        namespaces = sorted({job.namespace for job in jobs})
        may = {each: await self._access.may(visitor, each, "jobs") for each in namespaces}
        return [asdict(job) for job in sorted(jobs, key=_newest_first) if may[job.namespace]]

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        """Return the samples of a step (`?step=3&skip=100`), or the list of steps."""
        _, key = await self._allowed(request, "texts")
        async with self.feeds.of(key) as feed:
            if feed.folder is None:
                raise InvalidRequest("samples", str(key), "the dashboard cannot read the run folder")
            samples = feed.folder.samples
            if "step" in request.query:
                step, skip = _number(request, "step"), _number(request, "skip")
                found: object = await feed.texts.in_thread(lambda: samples.of_step(step, skip=skip))
            else:
                found = await feed.texts.in_thread(samples.steps)
        return tagged(request, encoded(found).encode(), "application/json")

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        """Return text and trace of a sample (`?id=sums/3/7/1`), each if present."""
        _, key = await self._allowed(request, "texts")
        id = request.query.get("id", "")
        async with self.feeds.of(key) as feed:
            folder = feed.folder
            found: dict[str, Any] = {"id": id[:300], "owner": feed.live.owner(id), "sample": None, "trace": None}
            if folder is None:
                found["missing"] = ["the dashboard cannot read the run folder"]
            else:
                found |= await feed.texts.in_thread(folder.everything_of, id)
        return tagged(request, encoded(found).encode(), "application/json")

    async def _yaml(self, request: web.Request) -> web.StreamResponse:
        _, key = await self._allowed(request, "jobs")
        text = yaml.safe_dump(await self._source.manifest(key), sort_keys=False, width=120)
        return tagged(request, text.encode(), "text/plain")

    # --- events --------------------------------------------------------------------------------------------------

    async def _jobs_stream(self, request: web.Request) -> web.StreamResponse:
        visitor = await self._visitor(request)
        with self._place_for(visitor):
            events = EventStream()
            events.latest("jobs", await self._visible(visitor))
            looking = asyncio.create_task(self._look_on(visitor, events))
            try:
                return await self._stream(request, events, events.reader(dict), lambda: self._visitor(request))
            finally:
                looking.cancel()

    async def _look_on(self, visitor: Visitor, events: EventStream) -> None:
        while True:
            await asyncio.sleep(_JOB_LIST_SECONDS)
            try:
                events.latest("jobs", await self._visible(visitor))
                events.latest("problem", "")
            except ClusterUnavailable as error:
                events.latest("problem", str(error))

    async def _job_stream(self, request: web.Request) -> web.StreamResponse:
        visitor, key = await self._allowed(request, "jobs")
        with self._place_for(visitor):
            async with self.feeds.of(key) as feed:
                reader = feed.reader(request.headers.get("Last-Event-ID", ""), await self._hidden(visitor, key))

                async def still() -> None:
                    now, _ = await self._allowed(request, "jobs")
                    reader.hidden = await self._hidden(now, key)

                return await self._stream(request, feed.events, reader, still)

    async def _hidden(self, visitor: Visitor, key: JobKey) -> tuple[str, ...]:
        return () if await self._access.may(visitor, key.namespace, "texts") else OF_LOGS

    @contextmanager
    def _place_for(self, visitor: Visitor) -> Iterator[None]:
        """Reserve one of the visitor's stream slots, or raise HTTPTooManyRequests."""
        if self._streams[visitor.name] >= MOST_STREAMS_OF_ONE:
            problem = f"{visitor.name} has {MOST_STREAMS_OF_ONE} pages of this dashboard open already: close one"
            raise web.HTTPTooManyRequests(text=problem)
        if self._streams.total() >= MOST_STREAMS:
            raise web.HTTPTooManyRequests(text=f"the dashboard has {MOST_STREAMS} open pages already: try again later")
        self._streams[visitor.name] += 1
        try:
            yield
        finally:
            self._streams[visitor.name] -= 1
            self._streams += Counter()  # drops zero counts

    async def _stream(
        self, request: web.Request, events: EventStream, reader: Reader, still: Callable[[], Awaitable[object]]
    ) -> web.StreamResponse:
        """Stream events until the browser leaves, or `still`, called at every heartbeat, finds access lost."""
        response = web.StreamResponse(
            headers={
                **HEADERS,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        try:
            await response.prepare(request)
            await self._write_on(response, reader, still)
        except (ConnectionError, TimeoutError, web.HTTPException, RLHFSpecError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            events.leave(reader)
        return response

    async def _write_on(
        self, response: web.StreamResponse, reader: Reader, still: Callable[[], Awaitable[object]]
    ) -> None:
        """Write events, and heartbeats after calling `still`, even if events never pause."""
        loop = asyncio.get_running_loop()
        data, beat_at = b"retry: 1000\n\n", loop.time() + KEEP_ALIVE_SECONDS
        while not reader.is_cut.is_set():
            if data:
                async with asyncio.timeout(_SLOW_READER_SECONDS):
                    await response.write(data)
            data = b""
            if loop.time() >= beat_at:
                await still()
                data, beat_at = b": still here\n\n", loop.time() + KEEP_ALIVE_SECONDS
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    event = await reader.queue.get()
                data = b"" if event.name in reader.hidden else event.encoded()


def _cookie(request: web.Request) -> str:
    """Return the cookie's name with the port, because browsers share cookies between ports."""
    port = request.headers.get("Host", "").rpartition(":")[2]
    return f"rlhfspec-{port}" if port.isdecimal() else "rlhfspec"


def _newest_first(job: JobHead) -> tuple[float, str, str]:
    return (-(job.created or 0.0), job.namespace, job.name)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidRequest(name, text[:40], "must be a whole number")
    return int(text)


def _plain(status: int, text: str, location: str | None = None) -> web.Response:
    headers = {} if location is None else {"Location": location}
    return web.Response(status=status, text=" ".join(text.split()) + "\n", headers=headers)
