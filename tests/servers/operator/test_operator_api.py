"""API server errors are retried or raised."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from api_servers import serving

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "rl", "name": "sums-prepare-0"}}
NO_WEBHOOK = 'Internal error occurred: failed calling webhook "no.example": connect: connection refused'
WRONG_TYPE = "failed to create typed patch object (rl/sums-prepare-0; /v1, Kind=Pod): .spec: expected string, got list"


@pytest.mark.parametrize(
    ("first", "is_answer"),
    [
        ((403, "exceeded quota: few"), True),
        ((422, "not on fridays"), True),
        ((500, NO_WEBHOOK), True),
        ((500, WRONG_TYPE), True),
        ((500, "etcdserver: request timed out"), False),
        ((503, "apiserver is shutting down"), False),
        ((429, "too many requests"), False),
    ],
)
async def test_a_refusal_is_returned_and_a_temporary_error_is_retried(
    first: tuple[int, str], is_answer: bool, tmp_path: Path
) -> None:
    left = [first, (200, "")]

    async def say(_: web.Request) -> web.Response:
        code, message = left.pop(0)
        return web.json_response({"kind": "Status", "message": message}, status=code)

    async with serving(say, tmp_path) as api:
        answer = await api.apply(POD)
    assert (answer.is_refused, len(left)) == (is_answer, is_answer)
    assert answer.message == (first[1] if is_answer else "")
