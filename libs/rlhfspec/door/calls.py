"""Calls of clients into an engine, token by token."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from rlhfspec.engine.base import Completion, EngineStep, FinishReason, Gain, Request, TopLogProbs
from rlhfspec.errors import RLHFSpecError, first_line
from rlhfspec.moves.migration.engine_calls import EngineCalls, EngineStopped

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine

MOST_CONVERSATIONS = 64  # conversations of a generator that may be continued with their KV
_PRIORITY = 2  # people wait; rollouts have 0
log = logging.getLogger("rlhfspec.door")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gained:
    """Tokens that a call gained in one step."""

    token_ids: list[int]
    log_probs: list[float]
    tempered_log_probs: list[float]  # of the distribution sampled from
    top_log_probs: tuple[TopLogProbs, ...]
    weights_version: int
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of the calls into an engine."""

    max_context: int
    most_tokens: int  # of prompt and response
    num_token_ids: int
    eos_token_ids: frozenset[int]


class PolicyCalls(Protocol):
    """Calls of clients into a policy: into one engine, or into the generators of a run."""

    @property
    def ended(self) -> RLHFSpecError | None:
        """Return why no call is taken, if so: for good, or until a generator answers."""
        ...

    @property
    def limits(self) -> CallLimits: ...

    @property
    def weights_version(self) -> int: ...

    def validate(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, if the request can never run."""
        ...

    def tokens(self, request: Request) -> AsyncGenerator[Gained, None]:
        """Yield a request's gains until it finishes. Closing the iterator cancels the request."""
        ...


@dataclass(slots=True)
class _OpenCall:
    token_ids: list[int]  # prompt and response so far
    name: str = ""  # in the engine
    is_over: bool = False
    is_urgent: bool = False  # goes before samples
    stays: bool = True  # with its KV, to be continued
    queue: asyncio.Queue[Gained | RLHFSpecError] = field(default_factory=asyncio.Queue)


class ClientCalls:
    """Calls of clients into an engine. A call whose prompt continues an earlier one finds the KV of that one.

    `between` runs functions between two steps of the engine; its owner passes each step's report to `stepped`. At most
    `most_urgent` calls at a time go before samples, by default as many as half of the rows.
    """

    def __init__(self, engine: Engine, between: EngineCalls, *, most_kept: int, most_urgent: int | None = None) -> None:
        self.limits = CallLimits(
            max_context=engine.state.config.max_context,
            most_tokens=engine.state.most_tokens,
            num_token_ids=engine.state.target.runner.num_token_ids,
            eos_token_ids=frozenset(engine.state.eos_token_ids),
        )
        self._engine = engine
        self._between = between
        self._most_urgent = max(engine.state.config.max_sequences // 2, 1) if most_urgent is None else most_urgent
        self._most_kept = most_kept  # conversations that may be continued with their KV
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the clients
        self.ended: RLHFSpecError | None = None  # why no call is taken any more
        self._open: dict[str, _OpenCall] = {}  # this and the next belong to the engine's thread
        self._kept: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # tokens of finished calls, the oldest first

    @property
    def weights_version(self) -> int:
        return self._engine.weights_version

    def validate(self, request: Request) -> None:
        self._engine.state.validate(request)

    def measure(self) -> None:
        """Measure the engine's costs, which the time per token of clients is held with. Call it before any step."""
        self._engine.speculation.measure()

    async def tokens(self, request: Request, response: Sequence[int] = ()) -> AsyncGenerator[Gained, None]:
        """Yield a request's gains. `response`: its first tokens, if another engine has sampled them."""
        call = _OpenCall([*request.prompt_token_ids, *response])
        self._loop = asyncio.get_running_loop()
        if self.ended is not None:
            raise self.ended
        try:
            await self._between.call(lambda: self._begin(request, response, call))
            while not call.is_over:
                gained = await call.queue.get()
                if isinstance(gained, RLHFSpecError):
                    raise gained
                call.is_over = gained.finish_reason is not None
                yield gained
        finally:
            if not call.is_over:
                with suppress(EngineStopped):
                    self._between.call(lambda: self._cancel(call))

    def stepped(self, report: EngineStep) -> list[Completion]:
        """Hand each call what it gained in a step, and return the other completions."""
        if not self._open:
            return list(report.finished)
        version, ours = self._engine.weights_version, set(self._open)
        errors = {done.id: done.error for done in report.finished if done.finish_reason == "error"}
        gains = [gain for gain in report.gains if gain.id in ours]
        self._hand([(self._open[gain.id], _gained(gain, version, errors.get(gain.id, ""))) for gain in gains])
        for gain in gains:
            self._open[gain.id].token_ids.extend(gain.token_ids.tolist())
            if gain.finish_reason is not None:
                call = self._open.pop(gain.id)
                if gain.finish_reason != "error" and call.stays:
                    self._keep(gain.id, tuple(call.token_ids))
        return [done for done in report.finished if done.id not in ours]

    def end(self, error: RLHFSpecError) -> None:
        """End all calls, and those to come, with this error."""
        self.ended = error
        self._hand([(call, error) for call in self._open.values()])
        self._open.clear()

    def leave(self) -> None:
        """End all calls with EngineStopped, and drop what the engine holds for them."""
        for name in (*self._open, *self._kept):
            self._engine.cancel(name)
        self._kept.clear()
        self.end(EngineStopped())

    def _hand(self, gains: Sequence[tuple[_OpenCall, Gained | RLHFSpecError]]) -> None:
        if gains and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_put_all, gains)

    def _begin(self, request: Request, response: Sequence[int], call: _OpenCall) -> None:
        if self.ended is not None:
            raise self.ended
        prompt = request.prompt_token_ids
        call.is_urgent = sum(each.is_urgent for each in self._open.values()) < self._most_urgent
        priority = _PRIORITY if call.is_urgent else 0
        call.stays = request.weights_version is None  # else the next turn would be bound to that version too
        is_new = bool(response) or not call.stays
        kept = [] if is_new else [name for name, token_ids in self._kept.items() if begins(prompt, token_ids)]
        name = max(kept, key=self._length, default=None)
        if name is None:
            name = request.id
            self._engine.submit(replace(request, stays=call.stays, priority=priority), response)
        else:
            self._engine.extend(
                name, prompt[self._length(name) :], seed=request.seed, params=request.params,
                top_log_probs=request.top_log_probs, priority=priority,
            )  # fmt: skip
            del self._kept[name]
        call.name = name
        self._open[name] = call

    def _length(self, name: str) -> int:
        return len(self._kept[name])

    def _cancel(self, call: _OpenCall) -> None:
        if self._open.get(call.name) is call:
            del self._open[call.name]
            self._engine.cancel(call.name)

    def _keep(self, name: str, token_ids: tuple[int, ...]) -> None:
        self._kept[name] = token_ids
        if len(self._kept) > self._most_kept:
            oldest, _ = self._kept.popitem(last=False)
            self._engine.cancel(oldest)


class EngineThread:
    """Thread that steps an engine for the calls of clients alone."""

    def __init__(self, engine: Engine, *, most_kept: int) -> None:
        self._engine = engine
        self._awake = threading.Event()
        self._between = EngineCalls(self._awake.set)
        self.calls = ClientCalls(engine, self._between, most_kept=most_kept, most_urgent=sys.maxsize)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End open calls with EngineStopped, and the thread."""
        self._is_closing = True
        self._awake.set()
        self._thread.join()

    def _run(self) -> None:
        ended: RLHFSpecError = EngineStopped()
        try:
            self.calls.measure()
            while not self._is_closing:
                self._between.run()
                if self._engine.has_work:
                    self.calls.stepped(self._engine.step())
                elif not self._between.waiting:
                    self._awake.wait()
                    self._awake.clear()
        except Exception as error:
            log.exception("the engine failed")
            ended = RLHFSpecError(f"the engine failed: {first_line(error)}")
        finally:
            self._between.close()
            self.calls.end(ended)


def begins(prompt: tuple[int, ...], kept: tuple[int, ...]) -> bool:
    """Return whether a prompt continues a finished call with these tokens."""
    length = len(kept)
    return length < len(prompt) and prompt[length - 1] == kept[-1] and prompt[:length] == kept


def _gained(gain: Gain, version: int, error: str) -> Gained:
    return Gained(
        token_ids=gain.token_ids.tolist(),
        log_probs=gain.log_probs.tolist(),
        tempered_log_probs=gain.tempered_log_probs.tolist(),
        top_log_probs=gain.top_log_probs,
        weights_version=version,
        finish_reason=gain.finish_reason,
        error=error,
    )


def _put_all(pieces: Sequence[tuple[_OpenCall, Gained | RLHFSpecError]]) -> None:
    for call, piece in pieces:
        call.queue.put_nowait(piece)
