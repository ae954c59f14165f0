"""The reports of controls: whose token it is, what they say, and how often."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kubernetes import client
from operators import Operator, World, token_of, until
from shared_servers import SharedServers
from tenant import CALM, HOSTILE, SAYS_SECONDS, Tenant, owner

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report

pytestmark = pytest.mark.ci
REPORTER = "reporter"


class Endpoint:
    """Of the operator, as a process of a pod would ask it."""

    def __init__(self, operator: Operator, servers: SharedServers) -> None:
        self.port, self.authority = operator.reports, servers.keys.ca_pem.decode()

    def post(self, namespace: str, job: str, token: str, body: bytes) -> int:
        url = f"https://127.0.0.1:{self.port}{names.report_path(namespace, job)}"
        asked = urllib.request.Request(url, body, {"Authorization": f"Bearer {token}"})
        try:
            tls = ssl.create_default_context(cadata=self.authority)
            with urllib.request.urlopen(asked, timeout=20, context=tls) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture(scope="module")
def endpoint(operator: Operator, servers: SharedServers) -> Endpoint:
    return Endpoint(operator, servers)


@pytest.fixture(scope="module")
def reporter(tenant: Tenant, operator: Operator) -> Iterator[str]:
    """A job of hers whose control runs."""
    uid = tenant.running(REPORTER)
    yield uid
    tenant.delete(REPORTER)


@pytest.fixture(scope="module")
def token(tenant: Tenant, reporter: str) -> str:
    return token_of(tenant, HOSTILE, f"{REPORTER}-control-0")


def report(tenant: Tenant, **fields: Any) -> bytes:
    run = tenant.status(HOSTILE, REPORTER)["run"]["uid"]
    return json.dumps({"run": run, **fields}).encode()


def test_the_token_of_a_control_is_valid_only_for_its_own_job(tenant: Tenant, endpoint: Endpoint, token: str) -> None:
    body = report(tenant, step=1)
    assert endpoint.post(CALM, "works", token, body) == 403
    assert endpoint.post(HOSTILE, "another", token, body) == 404
    assert endpoint.post(HOSTILE, f"{REPORTER}%2F..%2F..%2Fcalm", token, body) == 404
    until(lambda: endpoint.post(HOSTILE, REPORTER, token, body) == 204, "her own is taken")


def test_a_tenant_cannot_create_a_token_of_another_namespace(tenant: Tenant) -> None:
    asked = {"spec": {"audiences": [names.AUDIENCE]}}
    with pytest.raises(client.ApiException) as refused:
        tenant.core.create_namespaced_service_account_token(names.SERVICE_ACCOUNT, CALM, asked)
    assert refused.value.status == 403


def test_a_forged_control_without_the_service_account_is_refused(
    tenant: Tenant, endpoint: Endpoint, reporter: str
) -> None:
    labels = names.labels_of(REPORTER, names.CONTROL, 0) | {names.RUN: tenant.status(HOSTILE, REPORTER)["run"]["uid"]}
    made = tenant.fake("fake-control", labels, owner(REPORTER, reporter))
    bound = {"apiVersion": "v1", "kind": "Pod", "name": "fake-control", "uid": made.metadata.uid}
    asked = {"spec": {"audiences": [names.AUDIENCE], "boundObjectRef": bound}}
    fake = tenant.core.create_namespaced_service_account_token("default", HOSTILE, asked).status.token
    assert endpoint.post(HOSTILE, REPORTER, fake, report(tenant, step=30)) == 403
    tenant.core.delete_namespaced_pod("fake-control", HOSTILE, grace_period_seconds=0)


def test_a_forged_control_with_the_service_account_is_refused(tenant: Tenant, endpoint: Endpoint) -> None:
    """In the place of a control that is not made yet."""
    uid, name = tenant.begun("early"), names.pod_name("early", names.CONTROL, 0)
    run = tenant.status(HOSTILE, "early")["run"]["uid"]
    labels = names.labels_of("early", names.CONTROL, 0) | {names.RUN: run}
    tenant.fake(name, labels, owner("early", uid), account=names.SERVICE_ACCOUNT)
    fake, body = token_of(tenant, HOSTILE, name), json.dumps({"run": run, "step": 30}).encode()
    assert endpoint.post(HOSTILE, "early", fake, body) == 403
    assert tenant.status(HOSTILE, "early").get("progress", {}).get("step", 0) == 0
    tenant.delete("early")


@pytest.mark.parametrize("audience", ["https://kubernetes.default.svc.cluster.local", "another"])
def test_a_token_for_another_audience_is_refused(
    tenant: Tenant, endpoint: Endpoint, reporter: str, audience: str
) -> None:
    foreign = token_of(tenant, HOSTILE, f"{REPORTER}-control-0", audience)
    assert endpoint.post(HOSTILE, REPORTER, foreign, report(tenant)) == 401


def test_a_token_that_is_bound_to_no_pod_is_refused(tenant: Tenant, endpoint: Endpoint, reporter: str) -> None:
    asked = {"spec": {"audiences": [names.AUDIENCE]}}
    unbound = tenant.core.create_namespaced_service_account_token(names.SERVICE_ACCOUNT, HOSTILE, asked).status.token
    assert endpoint.post(HOSTILE, REPORTER, unbound, report(tenant)) in (401, 403)


@pytest.mark.parametrize("how", ["longer", "calm's", "unsigned"])
def test_an_altered_token_is_refused(tenant: Tenant, endpoint: Endpoint, token: str, how: str) -> None:
    head, claims, signature = token.split(".")
    said = json.loads(base64.urlsafe_b64decode(claims + "=="))
    if how == "longer":
        said["exp"] += 10**9
    if how == "calm's":
        said["sub"] = f"system:serviceaccount:{CALM}:{names.SERVICE_ACCOUNT}"
    if how == "unsigned":
        head, signature = _part({"alg": "none", "typ": "JWT"}), ""
    assert endpoint.post(HOSTILE, REPORTER, f"{head}.{_part(said)}.{signature}", report(tenant)) == 401


def _part(claims: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


ABSURD: dict[str, dict[str, Any]] = {
    "a step of 2^70": {"step": 2**70},
    "a step of -1": {"step": -1},
    "no number": {"step": 1, "reward": float("nan"), "kl": float("inf")},
    "a step of 1e308": {"step": 1e308},
    "generators without end": {"generators_wanted": 10**18},
    "many workers": {"workers": [{"stage": "x" * 100, "worker": 2**63, "doing": "working"}] * 1000},
    "control characters": {"troubles": [{"reason": "Stalled", "workers": ["\x1b[2J\u202e\x00"]}]},
}


def test_an_absurd_report_is_refused_or_does_no_harm(tenant: Tenant, endpoint: Endpoint, token: str) -> None:
    """Or harms nobody: the job's status can still be written, as the next report shows."""
    for fields in ABSURD.values():
        _is_refused_or_goes_into_words(tenant, endpoint, token, fields)


def _is_refused_or_goes_into_words(tenant: Tenant, endpoint: Endpoint, token: str, fields: dict[str, Any]) -> None:
    body = report(tenant, **fields)
    answers = Counter[int]()
    until(lambda: answers.update([code := endpoint.post(HOSTILE, REPORTER, token, body)]) or code != 429, "an answer")
    assert set(answers) <= {204, 422, 429}, (fields, answers)
    step = tenant.status(HOSTILE, REPORTER)["progress"].get("step", 0) + 1
    until(lambda: endpoint.post(HOSTILE, REPORTER, token, report(tenant, step=step)) == 204, "the next is taken")
    until(
        lambda: tenant.status(HOSTILE, REPORTER)["progress"].get("step") == step,
        f"its step is in the status after {fields}",
        seconds=SAYS_SECONDS,
    )


def test_a_flood_of_reports_does_not_block_another_job(
    tenant: Tenant, world: World, endpoint: Endpoint, token: str
) -> None:
    """Of hers, and of tokens that nobody has; calm's control is heard all the same."""
    calms, body = token_of(world, CALM, "works-control-0"), report(tenant, step=1)
    run = world.status(CALM, "works")["run"]["uid"]
    tokens = [token if number % 2 else f"{token}{number}" for number in range(600)]
    with ThreadPoolExecutor(16) as crowd:
        answers = crowd.map(lambda each: endpoint.post(HOSTILE, REPORTER, each, body), tokens)
        heard = Report(run=run).model_dump_json().encode()
        until(lambda: endpoint.post(CALM, "works", calms, heard) == 204, "calm's is taken", seconds=SAYS_SECONDS)
        counted = Counter(answers)
    assert set(counted) <= {204, 401, 429}, counted
    assert counted[401] == 300
    assert counted[204] < 60


def test_many_silent_connections_do_not_block_reports(world: World, endpoint: Endpoint) -> None:
    silent = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(300)]
    calms, run = token_of(world, CALM, "works-control-0"), world.status(CALM, "works")["run"]["uid"]
    heard = Report(run=run).model_dump_json().encode()
    until(lambda: endpoint.post(CALM, "works", calms, heard) == 204, "calm's is taken", seconds=SAYS_SECONDS)
    for each in silent:
        each.close()
