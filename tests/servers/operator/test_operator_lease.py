"""A Lease that was overwritten or deleted is lost. Two replicas are tested in e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from api_servers import serving

from rlhfspec.operator.lease import Lease


@pytest.mark.parametrize(("code", "is_held"), [(200, True), (404, False), (409, False), (500, True)])
async def test_a_holder_whose_lease_was_rewritten_gives_up_at_once(code: int, is_held: bool, tmp_path: Path) -> None:
    """While the API server fails, the holder keeps the lease until it expires."""
    codes = [404, 201, code]  # there is none, it is made, and then

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "spec": {}}, status=codes.pop(0))

    async with serving(answer, tmp_path) as api:
        lease = Lease(api, "rlhf", "rl-operator", "a")
        for wanted in (True, is_held):
            await lease.attempt()
            assert lease.is_held == wanted
    assert codes == []
