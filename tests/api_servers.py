"""A scripted API server and an Api client of it; real answers are tested in e2e."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api


@asynccontextmanager
async def serving(answer: Handler, folder: Path) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(kubeconfig(server, folder)))
            access = KubeAccess()
        async with Api(access) as api:
            yield api


def kubeconfig(server: TestServer, folder: Path) -> Path:
    cluster = {"name": "a", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    user = {"name": "a", "user": {}}
    config = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "a"}
    (folder / "config").write_text(yaml.safe_dump(config))
    return folder / "config"
