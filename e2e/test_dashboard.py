"""The dashboard behind a real API server: who sees what, how it says what happens, and what it asks for itself."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "e2e"), str(ROOT / "tests")]

from cluster import ControlPlane  # noqa: E402
from dashboards import Stream, served, visiting  # noqa: E402

from rlhfspec.cluster import names  # noqa: E402
from rlhfspec.cluster.access import KubeAccess  # noqa: E402
from rlhfspec.cluster.api import Api  # noqa: E402
from rlhfspec.dashboard.access import ClusterAccess  # noqa: E402
from rlhfspec.dashboard.jobs.cluster import ClusterSource, Servers  # noqa: E402

pytestmark = pytest.mark.ci
USER = "system:serviceaccount:rlhf:dashboard"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
    "spec": {
        "group": names.GROUP,
        "scope": "Namespaced",
        "names": {"plural": names.PLURAL, "kind": names.KIND, "singular": "rlhfjob"},
        "versions": [
            {
                "name": names.VERSION,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": OPEN, "status": OPEN}}},
            }
        ],
    },
}
# What the chart grants the dashboard.
RULES = [
    {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
    {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
    {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
]
JOBS = {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["get", "list"]}
SAID = "ValueError: the answer of the user was 42"
LOGS = {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        plane.define(CRD)
        for namespace in ("team-a", "team-b"):
            plane.kubectl("create", "namespace", namespace)
            plane.apply(job(namespace))
        role(plane, "dashboard", USER, RULES)
        for account, namespace, rules in (
            ("looker", "team-a", [JOBS]), ("reader", "team-a", [JOBS, LOGS]), ("nobody", "team-b", []),
        ):  # fmt: skip
            plane.kubectl("create", "serviceaccount", account, "-n", namespace)
            role(plane, account, f"system:serviceaccount:{namespace}:{account}", rules, namespace=namespace)
        yield plane


def job(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "metadata": {"name": "sums", "namespace": namespace},
        "spec": {"algorithm": {"name": "grpo"}, "model": {"path": "m"}, "training": {"steps": 9}, "secret": "hidden"},
    }


def role(plane: ControlPlane, name: str, user: str, rules: list[Any], *, namespace: str = "") -> None:
    kind = "Role" if namespace else "ClusterRole"
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    api = "rbac.authorization.k8s.io"
    plane.apply(
        {"apiVersion": f"{api}/v1", "kind": kind, "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{api}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": kind, "name": name},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    )


def token(plane: ControlPlane, account: str, namespace: str = "team-a") -> str:
    return plane.kubectl("create", "token", account, "-n", namespace).strip()


def at_dashboard(plane: ControlPlane, check: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        config = plane.kubeconfig_of(USER)
        # The client takes a colon for the beginning of another path.
        access = KubeAccess(str(config.rename(config.with_name("dashboard.kubeconfig"))))
        async with (
            Api(access, agent="rlhfspec-dashboard", deadline_seconds=0.0) as api,
            served(ClusterSource(api, Servers()), ClusterAccess(api)) as (_, url),
        ):
            await check(url)

    asyncio.run(main())


def set_status(plane: ControlPlane, **status: Any) -> None:
    patch = json.dumps({"status": status})
    plane.kubectl("patch", names.PLURAL, "sums", "-n", "team-a", "--subresource=status", "--type=merge", "-p", patch)


def test_everybody_sees_the_jobs_of_their_namespaces_alone(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        seen = {}
        for account, namespace in (("looker", "team-a"), ("reader", "team-a"), ("nobody", "team-b")):
            async with visiting(token(kubernetes, account, namespace)) as session:
                jobs = await (await session.get(f"{url}/api/jobs")).json()
                seen[account] = [each["namespace"] for each in jobs]
        assert seen == {"looker": ["team-a"], "reader": ["team-a"], "nobody": []}

    at_dashboard(kubernetes, check)


def test_a_deleted_namespace_takes_its_own_jobs_alone(kubernetes: ControlPlane) -> None:
    """Of a dashboard with rights in its namespaces, which go with them."""
    kubernetes.kubectl("create", "namespace", "gone")
    kubernetes.apply(job("gone"))
    for namespace in ("gone", "team-a"):
        role(kubernetes, "dashboard", "of-some", [JOBS], namespace=namespace)
    role(kubernetes, "reviews", "of-some", RULES[:2])
    access = KubeAccess(str(kubernetes.kubeconfig_of("of-some")))

    async def seen() -> list[str]:
        async with (
            Api(access, agent="rlhfspec-dashboard", deadline_seconds=0.0) as api,
            served(ClusterSource(api, Servers(), namespaces=("gone", "team-a")), ClusterAccess(api)) as (_, url),
            visiting(token(kubernetes, "looker")) as session,
        ):
            answer = await session.get(f"{url}/api/jobs")
            assert answer.status == 200, await answer.text()
            return [each["namespace"] for each in await answer.json()]

    assert asyncio.run(seen()) == ["team-a"]
    kubernetes.kubectl("delete", "namespace", "gone", "--timeout=60s")
    assert asyncio.run(seen()) == ["team-a"]


@pytest.mark.parametrize("path", ["events", "samples", "sample?id=sums/1/0/0"])
def test_another_namespace_is_refused_by_name(kubernetes: ControlPlane, path: str) -> None:
    async def check(url: str) -> None:
        async with visiting(token(kubernetes, "reader")) as session:
            answer = await session.get(f"{url}/api/jobs/team-b/sums/{path}")
            assert answer.status == 403
            assert (await answer.text()).startswith("system:serviceaccount:team-a:reader may not get ")
            hidden = await session.get(f"{url}/api/jobs/team-b/none/{path}")
            assert hidden.status == 403  # nor whether it is there

    at_dashboard(kubernetes, check)


def test_texts_are_for_those_who_may_read_logs(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        answers = {}
        for account in ("looker", "reader"):
            async with visiting(token(kubernetes, account)) as session:
                answers[account] = await session.get(f"{url}/api/jobs/team-a/sums/samples")
        assert answers["looker"].status == 403
        assert (answers["reader"].status, await answers["reader"].text()) == (
            404, "samples: the dashboard cannot read the run folder (got 'team-a/sums')\n",
        )  # fmt: skip

    at_dashboard(kubernetes, check)


@pytest.mark.parametrize("shown", ["", "nonsense", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9."])
def test_a_visitor_without_identity_sees_only_the_login(kubernetes: ControlPlane, shown: str) -> None:
    async def check(url: str) -> None:
        async with visiting(shown) as session:
            for path in ("/api/jobs", "/api/jobs/team-a/sums/events"):
                assert (await session.get(f"{url}{path}")).status == 401
            page = await session.get(f"{url}/")
            assert page.url.path == "/login"

    at_dashboard(kubernetes, check)


def test_a_login_keeps_the_token_where_no_script_reads_it(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        async with visiting("") as session:
            given = token(kubernetes, "looker")
            answer = await session.post(f"{url}/login", data={"token": given}, allow_redirects=False)
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            for word in ("HttpOnly", "Secure", "SameSite=Strict", "Path=/"):
                assert word in answer.headers["Set-Cookie"]
            wrong = await session.post(f"{url}/login", data={"token": "wrong"}, allow_redirects=False)
            assert (wrong.headers["Location"], wrong.headers.get("Set-Cookie")) == ("/login#refused", None)

    at_dashboard(kubernetes, check)


def test_conditions_arrive_as_the_operator_writes_them(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        async with (
            visiting(token(kubernetes, "looker")) as session,
            Stream(session, f"{url}/api/jobs/team-a/sums/events") as stream,
        ):
            first = await stream.next("job")
            assert "hidden" not in json.dumps(first.data)
            condition = {
                "type": "Healthy", "status": "False", "reason": "ImagePull", "message": "no such image",
                "lastTransitionTime": "2026-11-23T01:02:03Z",
            }  # fmt: skip
            set_status(kubernetes, phase="Starting", conditions=[condition], progress={"step": 3, "totalSteps": 9})
            while (told := (await stream.next("job")).data)["head"]["phase"] != "Starting":
                pass
            assert (told["head"]["step"], told["conditions"][0]["reason"]) == (3, "ImagePull")

    at_dashboard(kubernetes, check)


@pytest.mark.parametrize("loses", ["its right", "its account"])
def test_a_visitor_who_loses_access_loses_the_open_page(kubernetes: ControlPlane, loses: str) -> None:
    """With the seconds of a release: within those of a review and a beat, and what the API server itself remembers."""
    name = loses.split()[-1]
    kind = "rolebinding" if loses == "its right" else "serviceaccount"

    async def check(url: str) -> None:
        kubernetes.kubectl("create", "serviceaccount", name, "-n", "team-a")
        role(kubernetes, name, f"system:serviceaccount:team-a:{name}", [JOBS], namespace="team-a")
        async with (
            visiting(token(kubernetes, name)) as session,
            Stream(session, f"{url}/api/jobs/team-a/sums/events") as stream,
        ):
            await stream.next("job")
            kubernetes.kubectl("delete", kind, name, "-n", "team-a")
            began = time.monotonic()
            async with asyncio.timeout(60):
                while not await stream.is_over():
                    pass
            print(f"{loses}: the page was closed after {time.monotonic() - began:.1f} s")
            refused = await session.get(f"{url}/api/jobs/team-a/sums/events")
            assert refused.status == (403 if loses == "its right" else 401)

    at_dashboard(kubernetes, check)


def test_what_a_pod_said_last_is_for_those_who_may_read_logs(kubernetes: ControlPlane) -> None:
    ended_pod(kubernetes)

    async def check(url: str) -> None:
        heard = {}
        for account in ("looker", "reader"):
            async with (
                visiting(token(kubernetes, account)) as session,
                Stream(session, f"{url}/api/jobs/team-a/sums/events") as stream,
            ):
                told = [await stream.next() for _ in range(5 if account == "reader" else 3)]
                heard[account] = {each.name: each.data for each in told}
        assert heard["looker"].keys() == {"whole", "job", "now"}
        assert heard["reader"]["last_words"] == {"sums-reward-0": SAID}
        for job in (each["job"] for each in heard.values()):
            assert [pod["message"] for pod in job["pods"]] == ["Error, exit code 1"]
        assert SAID not in json.dumps(heard["looker"])

    at_dashboard(kubernetes, check)


def ended_pod(plane: ControlPlane) -> None:
    """Its process wrote a line of its log into the pod's status."""
    container = {"name": "worker", "image": "x"}
    metadata = {"name": "sums-reward-0", "namespace": "team-a", "labels": {names.JOB: "sums", names.ROLE: "reward"}}
    plane.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
    state = {"terminated": {"exitCode": 1, "reason": "Error", "message": f"{SAID}\n"}}
    status = {
        "phase": "Failed",
        "containerStatuses": [container | {"imageID": "", "ready": False, "restartCount": 0, "state": state}],
    }
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "pod", "sums-reward-0", "-n", "team-a", "--subresource=status", "--type=merge", "-p", patch)


def test_the_yaml_is_for_those_who_may_get_the_job(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        path = f"{url}/api/jobs/team-a/sums/yaml"
        async with visiting(token(kubernetes, "looker")) as session:
            shown = yaml.safe_load(await (await session.get(path)).text())
        there = kubernetes.get("-n", "team-a", names.PLURAL, "sums")
        assert shown["spec"] == there["spec"]
        assert shown["kind"] == names.KIND
        assert "managedFields" not in shown["metadata"]
        async with visiting(token(kubernetes, "nobody", "team-b")) as session:
            assert (await session.get(path)).status == 403

    at_dashboard(kubernetes, check)


def test_an_api_server_that_is_away_is_said_in_one_line(kubernetes: ControlPlane) -> None:
    async def check(url: str) -> None:
        given = token(kubernetes, "looker")
        async with visiting(given) as session:
            kubernetes.stop_api_server()
            try:
                answer = await session.get(f"{url}/api/jobs")
                text = await answer.text()
            finally:
                kubernetes.start_api_server()
            assert answer.status == 503
            assert text.startswith("request to the API server failed (POST ")
            assert text.count("\n") == 1
            assert given not in text
            async with asyncio.timeout(60):  # at first it knows of no roles
                while (await session.get(f"{url}/api/jobs")).status != 200:
                    await asyncio.sleep(0.1)

    at_dashboard(kubernetes, check)


def test_the_dashboard_uses_all_its_rights_and_no_others(kubernetes: ControlPlane) -> None:
    """What it was granted is what it did, all of it and no more."""
    did = {
        (event["verb"], event["objectRef"]["resource"])
        for event in kubernetes.audit()
        if event["user"]["username"] == USER and event["stage"] == "ResponseComplete"
    }
    assert did == {(verb, each["resources"][0]) for each in RULES for verb in each["verbs"]}
