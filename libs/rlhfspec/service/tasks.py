"""Several tasks at once: waiting for all of them, and ending them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

AGAIN_SECONDS = 0.1


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Until all are done; the first that fails ends the others, and is raised as it is.

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
    """Cancels until each of them is over: a library that waits for two things at once may lose a cancellation.

    redis-py does when its own timeout or its answer comes at the same moment (asyncio.wait_for of Python 3.11).

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
        await asyncio.wait(left, timeout=AGAIN_SECONDS)
