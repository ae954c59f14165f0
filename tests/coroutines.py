"""Coroutine tests, each run in its own event loop, and what they wait with."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE_SECONDS = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


async def until(condition: Callable[[], Any], what: str = "what this test waits for") -> None:
    """Run threads and tasks until the condition. A fake clock stands still."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE_SECONDS
    while True:
        outcome = condition()
        if await outcome if inspect.isawaitable(outcome) else outcome:
            return
        assert loop.time() < end, f"never: {what}"
        await asyncio.sleep(0.001)
