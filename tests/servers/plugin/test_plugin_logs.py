from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from api_servers import serving
from typer.testing import CliRunner

from rlhfspec.plugin.main import app


@pytest.mark.parametrize("options", [[], ["--follow"], ["--role", "reward"]])
async def test_logs_of_a_job_without_pods_are_refused_with_its_name(tmp_path: Path, options: list[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/rlhfjobs/sums"):
            return web.json_response({"metadata": {"name": "sums"}, "status": {"phase": "Succeeded"}})
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    async with serving(answer, tmp_path):
        words = ["logs", "sums", "-n", "rl", "--kubeconfig", str(tmp_path / "config"), *options]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert done.exit_code == 2
    assert "sums" in done.output
    assert "none of its pods has a log: the job is Succeeded" in done.output
