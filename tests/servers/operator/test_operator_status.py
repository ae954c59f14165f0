"""Status writes: urgent changes at once, frequent ones once a second."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web
from api_servers import serving
from operator_world import SETTINGS, job_body

from rlhfspec.operator.deciding.situation import ReconcilePlan
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.queue import ReconcileResult

KEY = ("rl", "sums")


async def test_fast_steps_write_the_last_status_and_lose_none(tmp_path: Path) -> None:
    written: list[dict[str, Any]] = []
    wanted: dict[str, Any] = {}

    async def take(request: web.Request) -> web.Response:
        patch = await request.json()
        written.append(next(each["value"] for each in patch if each["path"] == "/status"))
        body = job_body()
        metadata = body["metadata"] | {"resourceVersion": str(100 + len(written))}
        return web.json_response(body | {"metadata": metadata, "status": written[-1]})

    cache = Cache()
    cache.put_job(job_body())
    async with serving(take, tmp_path) as api:
        looks = Reconciler(cache, api, SETTINGS, decide=lambda *_: ReconcilePlan(status=dict(wanted)))

        async def look(phase: str, step: int) -> ReconcileResult:
            wanted.update(phase=phase, progress={"step": step}, internal={"step": step})
            return await looks.reconcile(KEY)

        found = [await look("Running", step) for step in range(1, 9)]
        await asyncio.sleep(found[-1].requeue_seconds)  # as the queue does
        found.append(await look("Running", 8))
        found.append(await look("Failed", 9))
    assert [(each["phase"], each["progress"]["step"]) for each in written] == [
        ("Running", 1), ("Running", 8), ("Failed", 9),
    ]  # fmt: skip
    put_off = [looked.requeue_seconds for looked in found[1:8]]
    assert all(seconds is not None and 0 < seconds <= 1 for seconds in put_off), put_off
    assert [found[0].requeue_seconds, found[8].requeue_seconds, found[9].requeue_seconds] == [None] * 3
