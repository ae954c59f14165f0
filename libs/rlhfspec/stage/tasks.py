"""Helpers to run tasks together, cancel them reliably, or finish despite cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

_CANCEL_AGAIN_SECONDS = 0.1


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run coroutines together; the first failure cancels the others and is raised unchanged.

    >>> async def fails() -> None:
    ...     raise KeyError("answer")
    >>> async def main() -> None:
    ...     await together(asyncio.sleep(60.0), fails())
    >>> asyncio.run(main())
    Traceback (most recent call last):
        ...
    KeyError: 'answer'
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks repeatedly until they end, because redis-py may lose a cancellation (Python 3.11).

    >>> async def loses_the_first() -> None:
    ...     try:
    ...         await asyncio.sleep(60.0)
    ...     except asyncio.CancelledError:
    ...         await asyncio.sleep(60.0)
    >>> async def main() -> bool:
    ...     task = asyncio.create_task(loses_the_first())
    ...     await asyncio.sleep(0)
    ...     await ended(task)
    ...     return task.cancelled()
    >>> asyncio.run(main())
    True
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_AGAIN_SECONDS)


async def to_the_end(part: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine to its end even if cancelled, and raise the cancellation afterwards.

    >>> async def main() -> str:
    ...     said = []
    ...     async def close() -> None:
    ...         await asyncio.sleep(0.01)
    ...         said.append("closed")
    ...     task = asyncio.create_task(to_the_end(close()))
    ...     await asyncio.sleep(0)
    ...     await ended(task)
    ...     return f"{said[0]}, then cancelled: {task.cancelled()}"
    >>> asyncio.run(main())
    'closed, then cancelled: True'
    """
    task = asyncio.create_task(part)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # marks it as retrieved: no caller is left
        raise cancelled
    task.result()
