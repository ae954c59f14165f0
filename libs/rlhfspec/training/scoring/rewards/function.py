"""Rewards from a Python `module:function`, plain or async, per sample or prompt group."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rlhfspec.errors import InvalidRequest, did_you_mean
from rlhfspec.messages.records import Sample
from rlhfspec.training.scoring.rewards.base import Around, CallFailed, Reward, columns_of, number, numbers_of
from rlhfspec.training.scoring.rewards.user_code import CallResult, LoopThread, in_daemon_thread

Function = Callable[..., Any]


class FunctionRewards:
    """Source that calls `function` with its keyword arguments (docs/rewards.md)."""

    def __init__(self, function: Function, *, batched: bool, field: str) -> None:
        self.grouped = batched
        self._function = function
        self._field = field
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
        )
        self._loop = LoopThread()
        self._parameters, self._takes_all = _parameters(function, field)

    @property
    def wanted_columns(self) -> list[str]:
        given = self._given_names
        return [p.name for p in self._parameters if p.name not in given and p.default is inspect.Parameter.empty]

    @property
    def _given_names(self) -> tuple[str, ...]:
        texts = ("prompts", "completions") if self.grouped else ("prompt", "completion")
        return (*texts, "finish_reason")

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Raise InvalidRequest unless every required argument is a sample field or a column of every row.

        columns: maps each name to the first row that lacks it, or to an empty string.
        """
        for name in self.wanted_columns:
            if columns.get(name):
                problem = f"the function needs this column, and {columns[name]} of the data lacks it: fill it in, or "
                raise InvalidRequest(self._field, name, f"{problem}give the argument a default")
            if name not in columns:
                offered = [*self._given_names, *columns]
                hint = did_you_mean(name, offered)
                raise InvalidRequest(
                    self._field,
                    name,
                    f"the function needs an argument that nothing provides{hint or '.'} Known: {', '.join(offered)}",
                )

    async def start(self) -> None:
        pass

    async def rewards(self, samples: Sequence[Sample], around: Around = nullcontext) -> list[Reward]:
        arguments = self._arguments(samples)
        outcome = await self._call(arguments, around)
        if outcome.error is not None:
            error = outcome.error
            said = f": {error}" if str(error) else ""  # str(MemoryError()) is empty
            raise CallFailed(f"it raised {type(error).__name__}{said}", temporary=True, cause=error)
        return numbers_of(outcome.value, samples) if self.grouped else [number(outcome.value, "what it returned")]

    async def _call(self, arguments: dict[str, Any], around: Around) -> CallResult:
        async def awaited() -> Any:
            with around():
                return await self._function(**arguments)

        def called() -> Any:
            with around():
                return self._function(**arguments)

        if self._is_async:
            return await self._loop.outcome(awaited)
        return await asyncio.wrap_future(in_daemon_thread(called))

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        rows = [self._row(sample) for sample in samples]
        if not self.grouped:
            return rows[0]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def _row(self, sample: Sample) -> dict[str, Any]:
        texts = (sample.prompt_text, sample.text, sample.finish_reason)
        offered = columns_of(sample) | dict(zip(self._given_names, texts, strict=True))
        for name in self.wanted_columns:
            if name not in offered:
                raise CallFailed(f"its data row has no column {name!r}, which the function needs", temporary=False)
        if self._takes_all:
            return offered
        return {p.name: offered[p.name] for p in self._parameters if p.name in offered}

    async def close(self) -> None:
        await self._loop.close()


def _parameters(function: Function, field: str) -> tuple[list[inspect.Parameter], bool]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise InvalidRequest(field, function, "its signature cannot be read; wrap it in a def") from None
    named = []
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            named.append(parameter)
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY and parameter.default is inspect.Parameter.empty:
            raise InvalidRequest(field, parameter.name, "arguments are passed by name, but this one is positional-only")
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
