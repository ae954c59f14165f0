"""The client of operator, dashboard and plugin reaches the API server as the kubeconfig says."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from api_servers import kubeconfig

from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api
from rlhfspec.errors import ClusterUnavailable, InvalidRequest

NOBODY = {"server": "http://127.0.0.1:1"}
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "rl", "name": "sums"}}


async def asked(folder: Path, cluster: Callable[[int], dict[str, Any]], user: dict[str, Any]) -> web.Request:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response(POD)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        access = KubeAccess(kubeconfig(folder, cluster(server.port), user))
        async with Api(access, agent="somebody", deadline_seconds=0.0) as api:
            assert (await api.get("v1", "Pod", "rl", "sums")).body == POD
    [request] = seen
    return request


async def test_a_login_plugin_is_asked_for_the_token(tmp_path: Path) -> None:
    credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t1"}}
    plugin = tmp_path / "login"
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    login = {"apiVersion": credential["apiVersion"], "command": str(plugin), "interactiveMode": "Never"}
    request = await asked(tmp_path, lambda port: {"server": f"http://127.0.0.1:{port}"}, {"exec": login})
    assert request.headers["Authorization"] == "Bearer t1"
    assert request.headers["User-Agent"] == "somebody"


async def test_the_url_of_the_server_may_have_a_path(tmp_path: Path) -> None:
    request = await asked(tmp_path, lambda port: {"server": f"http://127.0.0.1:{port}/k8s/clusters/c-1"}, {})
    assert request.path == "/k8s/clusters/c-1/api/v1/namespaces/rl/pods/sums"


async def test_requests_go_through_the_proxy_of_the_kubeconfig(tmp_path: Path) -> None:
    proxied = {"server": "http://api.example.invalid"}
    request = await asked(tmp_path, lambda port: proxied | {"proxy-url": f"http://127.0.0.1:{port}"}, {})
    assert request.headers["Host"] == "api.example.invalid"


def test_another_name_may_stand_in_the_certificate(tmp_path: Path) -> None:
    cluster = {"server": "https://127.0.0.1:1", "tls-server-name": "api.example"}
    assert KubeAccess(kubeconfig(tmp_path, cluster)).options() == {"server_hostname": "api.example"}


def test_the_namespace_is_that_of_the_context(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path, NOBODY, namespace="rl")
    assert (KubeAccess(file).namespace, KubeAccess(file, "other").namespace) == ("rl", "elsewhere")
    assert KubeAccess(kubeconfig(tmp_path, NOBODY)).namespace == "default"


@pytest.mark.parametrize("content", ["", "clusters: [", "current-context: none\n", None])
def test_what_is_no_kubeconfig_is_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config").write_text(content)
    with pytest.raises(InvalidRequest, match="kubeconfig: cannot be used") as refused:
        KubeAccess(str(tmp_path / "config"))
    assert "\n" not in str(refused.value)


def test_an_unknown_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be used.*missing"):
        KubeAccess(kubeconfig(tmp_path, NOBODY), "missing")


async def test_a_zero_deadline_reports_an_absent_server_at_once(tmp_path: Path) -> None:
    async with Api(KubeAccess(kubeconfig(tmp_path, NOBODY)), deadline_seconds=0.0) as api:
        refused = r"GET /api/v1/namespaces/rl/pods/sums\): no answer: .*127\.0\.0\.1"
        with pytest.raises(ClusterUnavailable, match=refused):
            await api.get("v1", "Pod", "rl", "sums")
