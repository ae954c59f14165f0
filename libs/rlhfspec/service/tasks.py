"""Several waits of one worker at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
