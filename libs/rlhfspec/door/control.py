"""Calls of a gateway into a generator, over the control connection that moves use.

| the gateway asks | the generator replies |
|---|---|
| Call | at once, with nothing; the gains come with More |
| More | News: when a call has gained tokens or is lost, at a new version or question, or after `MORE_SECONDS` |
| Release | nothing; the calls end |

A call that no More asks for ends after `FORGOTTEN_SECONDS`, as its gateway is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rlhfspec.door.calls import CallLimits, ClientCalls, Gained
from rlhfspec.engine.base import Request
from rlhfspec.errors import MalformedRecord, RLHFSpecError
from rlhfspec.moves.migration.engine_calls import EngineStopped

MORE_SECONDS = 1.0
FORGOTTEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Question that begins a call. `response`: tokens that another generator sampled, which are not sampled again."""

    request: Request
    response: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """Question for the gains of calls beyond the first `seen[id]` ones."""

    seen: Mapping[str, int]
    weights_version: int  # as the asker knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Notice that calls are not asked for again."""

    ids: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Reply to More."""

    limits: CallLimits
    weights_version: int
    takes_calls: bool
    gains: dict[str, list[Gained]]
    lost: list[str]  # calls that do not run here


Question = Call | More | Release
_QUESTIONS: TypeAdapter[Any] = TypeAdapter(
    tuple[Literal["Call"], Call] | tuple[Literal["More"], More] | tuple[Literal["Release"], Release]
)
_NEWS = TypeAdapter(News)


def to_question(question: Question) -> bytes:
    return _QUESTIONS.dump_json((type(question).__name__, question))


def read_question(data: bytes) -> Question:
    question: Question = _read(_QUESTIONS, data)[1]
    return question


def read_news(data: bytes) -> News:
    news: News = _read(_NEWS, data)
    return news


def _read(kind: TypeAdapter[Any], data: bytes) -> Any:
    try:
        return kind.validate_json(data)
    except ValidationError as error:
        raise MalformedRecord(f"not a message about calls: {error.error_count()} faults") from None


@dataclass(slots=True)
class _ServedCall:
    asked_at: float
    running: asyncio.Task[None] | None = None
    gains: list[Gained] = field(default_factory=list)

    @property
    def is_lost(self) -> bool:
        """Return whether it ended without an end that the client may see."""
        is_over = self.running is None or self.running.done()
        return is_over and not (self.gains and self.gains[-1].finish_reason is not None)


class CallServer:
    """Generator's end of the calls of a gateway."""

    def __init__(self, calls: ClientCalls) -> None:
        self._calls = calls
        self._served: dict[str, _ServedCall] = {}
        self._news = asyncio.Event()
        self._num_asked = 0  # a newer More ends the wait of those before
        self._forgetting: asyncio.TimerHandle | None = None

    async def answer(self, data: bytes) -> bytes:
        question = read_question(data)
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = loop.call_later(FORGOTTEN_SECONDS, self._forget)
        self._forget()
        match question:
            case Call(request=request):
                if self._calls.ended is not None:
                    raise self._calls.ended
                served = self._served[request.id] = _ServedCall(now)
                served.running = asyncio.create_task(self._run(question, served))
            case More():
                return _NEWS.dump_json(await self._more(question))
            case Release(ids=ids):
                self._end(ids)
        return b""

    async def _run(self, call: Call, served: _ServedCall) -> None:
        try:
            async with aclosing(self._calls.tokens(call.request, call.response)) as gains:
                async for gained in gains:
                    served.gains.append(gained)
                    self._news.set()
        except EngineStopped:
            pass  # another generator goes on
        except RLHFSpecError as error:
            served.gains.append(self._failed(str(error)))
        finally:
            asyncio.get_running_loop().call_soon(self._news.set)  # when the task is done

    async def _more(self, question: More) -> News:
        loop = asyncio.get_running_loop()
        end = loop.time() + MORE_SECONDS
        self._num_asked += 1
        number = self._num_asked
        self._news.set()
        while True:
            self._news.clear()
            news = self._look(question, loop.time())
            is_news = news.gains or news.lost or news.weights_version != question.weights_version
            if is_news or number < self._num_asked or loop.time() >= end:
                return news
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(end - loop.time(), 0.0))

    def _look(self, question: More, now: float) -> News:
        gains, lost = {}, []
        for name, num_seen in question.seen.items():
            call = self._served.get(name)
            if call is not None:
                call.asked_at = now
            if call is not None and (new := call.gains[num_seen:]):
                gains[name] = new
            elif call is None or call.is_lost:
                lost.append(name)
        return News(
            limits=self._calls.limits, weights_version=self._calls.weights_version,
            takes_calls=self._calls.ended is None, gains=gains, lost=lost,
        )  # fmt: skip

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        self._end([name for name, call in self._served.items() if now - call.asked_at >= FORGOTTEN_SECONDS])

    def _end(self, names: list[str]) -> None:
        for name in names:
            call = self._served.pop(name, None)
            if call is not None and call.running is not None:
                call.running.cancel()

    def _failed(self, error: str) -> Gained:
        return Gained(
            token_ids=[], log_probs=[], tempered_log_probs=[], top_log_probs=(), finish_reason="error", error=error,
            weights_version=self._calls.weights_version,
        )  # fmt: skip
