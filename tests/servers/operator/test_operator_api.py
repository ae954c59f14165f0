"""API server errors are retried or raised."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from api_servers import serving

from rlhfspec.cluster.api import ApiResponse

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "rl", "name": "sums-prepare-0"}}
NO_WEBHOOK = 'Internal error occurred: failed calling webhook "no.example": connect: connection refused'

WRONG_TYPE = "failed to create typed patch object (rl/sums-prepare-0; /v1, Kind=Pod): .spec: expected string, got list"


def answers_of(answers: list[tuple[int, str]], folder: Path) -> tuple[ApiResponse, int]:
    left = list(answers)

    async def say(_: web.Request) -> web.Response:
        code, message = left.pop(0)
        return web.json_response({"kind": "Status", "message": message}, status=code)

    async def ask() -> ApiResponse:
        async with serving(say, folder) as api:
            return await api.apply(POD)

    return asyncio.run(ask()), len(answers) - len(left)


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
def test_a_refusal_is_an_answer_and_trouble_passes(first: tuple[int, str], is_answer: bool, tmp_path: Path) -> None:
    answer, num_asked = answers_of([first, (200, "")], tmp_path)
    assert (answer.is_refused, num_asked) == ((True, 1) if is_answer else (False, 2))
    assert answer.message == (first[1] if is_answer else "")
