"""A scripted API server and an Api client of it; real answers are tested in e2e."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
            patch.setenv("KUBECONFIG", kubeconfig(folder, {"server": str(server.make_url("/"))}))
            access = KubeAccess()
        async with Api(access) as api:
            yield api


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any] | None = None, **context: str) -> str:
    """Write a file with the contexts `one`, the current one, and `other`, and return its path."""
    of_both = {"cluster": "a", "user": "a"}
    contexts = [
        {"name": "one", "context": of_both | context},
        {"name": "other", "context": of_both | {"namespace": "elsewhere"}},
    ]
    content = {
        "clusters": [{"name": "a", "cluster": cluster}], "users": [{"name": "a", "user": user or {}}],
        "contexts": contexts, "current-context": "one",
    }  # fmt: skip
    (folder / "config").write_text(yaml.safe_dump(content))
    return str(folder / "config")
