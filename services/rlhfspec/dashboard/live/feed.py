"""State of one job's run, from its folder, Redis and NATS, sent to browsers as events.

A feed outlives its last reader briefly, so that a returning browser misses nothing. Events by name:

- whole: all curves and moves, for a new reader; steps, moves: later ones
- job, now: current conditions and pods; current generators and workers
- samples, last_words: latest sample texts and logs of ended pods, for users who may read logs
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.dashboard.jobs.folder import (
    COLUMNS,
    Changes,
    Row,
    RunReader,
    move_content,
    row_of,
    shown,
    warning_of_rows,
)
from rlhfspec.dashboard.jobs.source import Address, JobDetail, JobKey, JobSource, RunPlace
from rlhfspec.dashboard.live.hearing import Hearing
from rlhfspec.dashboard.live.live_state import Live
from rlhfspec.dashboard.live.readers import EventStream, Reader
from rlhfspec.errors import ClusterUnavailable, InvalidRequest, ServerFailed, StorageError
from rlhfspec.messages.records import EvaluationReport, Moved, Record, StepReport
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.transport.clock import Clock, SystemClock
from rlhfspec.runs.live.live import LiveView, read_live
from rlhfspec.stage.tasks import ended
from rlhfspec.stage.threads import ComputeThread

_TELL_BROWSERS_SECONDS = 0.5
TELL_MANY_SECONDS = 1.0  # with many generators, whose events are large
MANY = 50
REDIS_SECONDS = 0.5
FOLDER_SECONDS = 1.0
SOURCE_SECONDS = 1.0
_KEPT_MOVES = 200
MOST_POINTS = 600  # of a curve for a new browser; longer ones are thinned
_MOST_SAMPLES = 8
LINGER_SECONDS = 60.0  # after the last reader, so that a page reload finds the same feed

log = logging.getLogger("rlhfspec.dashboard")


class Feed:
    def __init__(self, key: JobKey, source: JobSource, *, clock: Clock | None = None) -> None:
        self.key = key
        self.events = EventStream()
        self.texts = ComputeThread(f"texts of {key}")  # separate, so that sample requests never delay curves
        self._thread = ComputeThread(f"folder of {key}")
        self.folder: RunReader | None = None
        self.live = Live()
        self._source = source
        self._clock = clock or SystemClock()
        self._detail: JobDetail | None = None
        self._place = RunPlace()
        self._address: Address | None = None  # currently subscribed to
        self._rows: dict[int, Row] = {}
        self._evaluations: dict[int, Evaluation] = {}
        self._moves: deque[dict[str, Any]] = deque(maxlen=_KEPT_MOVES)
        self._told_moves: set[str] = set()
        self._new_rows: dict[int, Row] = {}
        self._new_moves: list[dict[str, Any]] = []
        self._heads: dict[str, dict[str, Any]] = {}
        self._problems: dict[str, str] = {}
        self._hearing: Hearing | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._of_the_run: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._ask_source()
        await self._read_folder()
        if self._place.address is not None and self._place.address.redis_url is not None:
            await self._read_redis(self._place.address)
        self._tell()
        self._tasks = [asyncio.create_task(self._often(SOURCE_SECONDS, self._ask_source))]
        self._tasks.append(asyncio.create_task(self._often(FOLDER_SECONDS, self._read_folder)))
        self._tasks.append(asyncio.create_task(self._tell_on()))

    async def close(self) -> None:
        await ended(*self._tasks, *self._of_the_run)
        self.events.close()
        self._thread.close()
        self.texts.close()

    def reader(self, last_id: str, hidden: Sequence[str] = ()) -> Reader:
        """Return a reader from event `last_id` on, without the events in `hidden`."""
        return self.events.reader(self._whole, last_id, hidden)

    # --- gathering -----------------------------------------------------------------------------------------------

    async def _often(self, seconds: float, look: Callable[[], Any]) -> None:
        while True:
            await self._clock.sleep(seconds)
            try:
                await look()
            except (InvalidRequest, ClusterUnavailable) as error:
                self._problems["source"] = str(error)

    async def _ask_source(self) -> None:
        detail, place = await self._source.job(self.key), await self._source.place(self.key)
        self._problems.pop("source", None)
        if self._detail is not None and detail.head.created != self._detail.head.created:
            self._forget()
            self._place = RunPlace()
        self._detail = detail
        if place.folder != self._place.folder:
            self.folder = None if place.folder is None else RunReader(place.folder)
        if place.address != self._address:
            await self._listen_at(place.address)
        self._place = place

    def _forget(self) -> None:
        for told in (self._rows, self._new_rows, self._moves, self._new_moves, self._told_moves, self._heads):
            told.clear()
        self.folder, self._evaluations = None, {}
        self.events.anew(self._whole)

    async def _listen_at(self, address: Address | None) -> None:
        await ended(*self._of_the_run)
        self._of_the_run, self._hearing, self.live, self._address = [], None, Live(), address
        self._problems.pop("redis", None)
        if address is None:
            return
        if address.nats_url is not None:
            self._hearing = Hearing(address, self._heard)
            self._of_the_run.append(asyncio.create_task(self._hearing.run()))
        if address.redis_url is not None:
            self._of_the_run.append(asyncio.create_task(self._often(REDIS_SECONDS, lambda: self._read_redis(address))))

    async def _read_redis(self, address: Address) -> None:
        assert address.redis_url is not None
        try:
            view = await read_live(
                address.redis_url, address.uid, credentials=address.credentials, now=self._clock.now()
            )
        except (ServerFailed, InvalidRequest) as error:
            self._problems["redis"] = str(error)
            return
        self._problems.pop("redis", None)
        self._seen(view)

    def _seen(self, view: LiveView) -> None:
        self.live.seen(view)
        for line in view.window.steps:
            self._row(row_of(line))
        for head in view.window.samples:
            if head.id not in self._heads:
                content = {"id": head.id, "prompt": shown(head.prompt, 200), "text": shown(head.text, 200)}
                self._heads[head.id] = content
        while len(self._heads) > _MOST_SAMPLES:
            del self._heads[next(iter(self._heads))]

    async def _read_folder(self) -> None:
        if self.folder is None:
            return
        try:
            self._take(await self._thread.in_thread(self.folder.changes))
            self._problems.pop("folder", None)
        except (StorageError, OSError) as error:
            self._problems["folder"] = str(error)

    def _take(self, changes: Changes) -> None:
        if changes.anew:
            self._rows.clear()
            self._new_rows.clear()
        self._evaluations |= {run.step: run for run in changes.evaluations}
        for row in changes.rows:
            self._row(row)
        for move in changes.moves[-_KEPT_MOVES:]:
            self._move(move)
        if changes.anew:
            self.events.anew(self._whole)

    def _heard(self, record: Record) -> None:
        if isinstance(record, StepReport):
            self._row(row_of(record.metrics.to_line()))
        elif isinstance(record, EvaluationReport):
            self._evaluations[record.step] = record.evaluation
        elif isinstance(record, Moved):
            self._move(move_content(record, time.time()))

    def _row(self, row: Row | None) -> None:
        if row is not None and row[0] is not None and self._rows.get(int(row[0])) != row:
            self._rows[int(row[0])] = self._new_rows[int(row[0])] = row

    def _move(self, move: dict[str, Any]) -> None:
        if move["id"] not in self._told_moves:
            if len(self._told_moves) > 10 * _KEPT_MOVES:
                self._told_moves = {each["id"] for each in self._moves}
            self._told_moves.add(move["id"])
            self._moves.append(move)
            self._new_moves.append(move)

    # --- sending -------------------------------------------------------------------------------------------------

    async def _tell_on(self) -> None:
        while True:
            many = self.live.num_generators > MANY
            await self._clock.sleep(TELL_MANY_SECONDS if many else _TELL_BROWSERS_SECONDS)
            self._tell()

    def _tell(self) -> None:
        rows, self._new_rows = self._new_rows, {}
        moves, self._new_moves = self._new_moves[-_KEPT_MOVES:], []
        if rows:
            self.events.keep("steps", thinned(rows))
        if moves:
            self.events.keep("moves", moves)
        self.events.latest("job", self._job())
        self.events.latest("last_words", self._last_words())
        self.events.latest("samples", list(self._heads.values()))
        self.events.latest("now", self.live.content(self._clock.now()))

    def _job(self) -> dict[str, Any]:
        assert self._detail is not None
        problems = [*self._problems.values()]
        if self._hearing is not None and self._hearing.problem:
            problems.append(self._hearing.problem)
        told = asdict(self._detail)
        del told["last_words"]
        return told | {
            "is_live": self._place.address is not None,
            "has_folder": self.folder is not None,
            "warning": warning_of_rows(self._rows, self._evaluations),
            "problems": problems,
        }

    def _last_words(self) -> dict[str, str]:
        assert self._detail is not None
        return {pod: shown(words, len(words)) for pod, words in self._detail.last_words.items()}

    def _whole(self) -> dict[str, Any]:
        return {"columns": list(COLUMNS), "rows": thinned(self._rows), "moves": list(self._moves)}


@dataclass(slots=True)
class _Used:
    starting: asyncio.Task[Feed]
    num_users: int = 0
    ending: asyncio.TimerHandle | None = None


class Feeds:
    def __init__(self, source: JobSource, *, linger_seconds: float = LINGER_SECONDS) -> None:
        self._source = source
        self._linger_seconds = linger_seconds
        self._feeds: dict[JobKey, _Used] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def keys(self) -> list[JobKey]:
        return list(self._feeds)

    @asynccontextmanager
    async def of(self, key: JobKey) -> AsyncIterator[Feed]:
        """Yield the job's feed, or raise the source's error."""
        used = self._feeds.get(key)
        if used is None:
            used = self._feeds[key] = _Used(asyncio.create_task(self._started(key)))
        if used.ending is not None:
            used.ending.cancel()
            used.ending = None
        used.num_users += 1
        try:
            yield await asyncio.shield(used.starting)
        finally:
            used.num_users -= 1
            if used.num_users == 0:
                self._end_later(key, used)

    async def _started(self, key: JobKey) -> Feed:
        feed, started = Feed(key, self._source), False
        try:
            await feed.start()
            started = True
        finally:
            if not started:
                self._feeds.pop(key, None)
                await feed.close()
        return feed

    def _end_later(self, key: JobKey, used: _Used) -> None:
        if self._feeds.get(key) is used:
            loop = asyncio.get_running_loop()
            used.ending = loop.call_later(self._linger_seconds, self._end, key, used)

    def _end(self, key: JobKey, used: _Used) -> None:
        if used.num_users == 0 and self._feeds.get(key) is used:
            del self._feeds[key]
            task = asyncio.create_task(used.starting.result().close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for key, used in list(self._feeds.items()):
            del self._feeds[key]
            if used.ending is not None:
                used.ending.cancel()
            if used.starting.done() and not used.starting.exception():
                await used.starting.result().close()
            else:
                used.starting.cancel()
        await asyncio.gather(*self._closing)


def thinned(rows: dict[int, Row]) -> list[Row]:
    """Return every n-th row in order, at most MOST_POINTS, and the last.

    >>> [len(thinned({step: [step] for step in range(count)})) for count in (10, 600, 601, 10_000)]
    [10, 600, 301, 590]
    """
    ordered = [rows[step] for step in sorted(rows)]
    every = -(-len(ordered) // MOST_POINTS) or 1
    kept = ordered[::every]
    return kept if not ordered or kept[-1] is ordered[-1] else [*kept, ordered[-1]]
