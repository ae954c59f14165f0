"""The chart's NetworkPolicies allow exactly the edges of the map."""

import importlib
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from helm import ROOT, needs_helm, of_kind, rendered
from operator_world import SETTINGS, World, job_body

from rlhfspec.cluster import names
from rlhfspec.operator.making.network import OWN_PORTS

sys.path.insert(0, str(ROOT / "charts"))
edges = importlib.import_module("edges")
SERVED = (names.GRPC_PORT, names.MOVES_PORT, names.LINK_PORT, names.HTTP_PORT, names.RANKS_PORT)
PORTS = (53, 5353, 443, *SERVED, names.NATS_PORT, names.REDIS_PORT, names.REPORT_PORT, names.DASHBOARD_PORT)
Policy = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str
    labels: dict[str, str]


def job_pod(role: str, *, namespace: str = "ml", **more: str) -> Pod:
    return Pod(role, namespace, names.labels_of("sums", role, 0) | more)


def part_of_release(component: str, *, release: str = "rlhfspec") -> Pod:
    labels = {names.NAME: "rlhfspec", "app.kubernetes.io/instance": release, names.COMPONENT: component}
    return Pod(component, "ml", labels)


PARTIES = [*map(job_pod, names.ROLES), *map(part_of_release, edges.COMPONENTS)]
DNS = Pod("dns", "kube-system", {"k8s-app": "kube-dns"})
PROMETHEUS = Pod("prometheus", "monitoring", {names.NAME: "prometheus"})
STRANGER = Pod("stranger", "ml", {"app": "web"})
HALF = {names.NAME: "rlhfspec", names.JOB: "sums", names.ROLE: "generator"}  # but not managed by the operator
OTHERS_LABELS = Pod("half a stranger", "ml", HALF)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def is_peer(peer: dict[str, Any], pod: Pod, policy_namespace: str) -> bool:
    if "ipBlock" in peer:
        return False  # pods of ours are known by labels alone
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": pod.namespace}):
            return False
    elif pod.namespace != policy_namespace:
        return False
    return selects(peer.get("podSelector", {}), pod.labels)


def allows(policies: list[Policy], at: Pod, other: Pod, port: int, way: str) -> bool:
    """Return whether policies allow a connection. `way`: Ingress or Egress. Unselected pods are free."""
    of_pod = [
        policy for policy in policies
        if policy["metadata"].get("namespace", "ml") == at.namespace
        and way in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], at.labels)
    ]  # fmt: skip
    if not of_pod:
        return True
    peers = "from" if way == "Ingress" else "to"
    return any(
        any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        and is_peer(peer, other, at.namespace)
        for policy in of_pod
        for rule in policy["spec"].get(way.lower()) or []
        for peer in rule[peers]
    )


def reaches(policies: list[Policy], source: Pod, to: Pod, port: int) -> bool:
    return allows(policies, source, to, port, "Egress") and allows(policies, to, source, port, "Ingress")


def policies_of(values: dict[str, Any] | None = None) -> list[Policy]:
    return of_kind(rendered(values), "NetworkPolicy")


@needs_helm
def test_policies_allow_exactly_the_edges_of_the_map() -> None:
    policies = policies_of()
    everybody = [*PARTIES, DNS, PROMETHEUS]
    others = (DNS, PROMETHEUS)
    pairs = [(a, b) for a in everybody for b in everybody if a not in others or b not in others]
    found = {(a.name, b.name, port) for a, b in pairs for port in PORTS if reaches(policies, a, b, port)}
    drawn = [edge for edge in edges.edges() if edge.to != "api"]
    assert found == {(e.source, e.to, port) for e in drawn for port in PORTS if e.port <= port <= (e.last or e.port)}


ALL_OWN: dict[str, Any] = {"trainer": {"nodes": 2}, "generator": {"workers": 2, "weights": "group"}}


def of_job(name: str, roles: dict[str, Any]) -> tuple[list[Policy], dict[str, Pod]]:
    world = World(job_body(roles=roles), settings=SETTINGS.model_copy(update={"network_policies": True}))
    world.to_running()

    def named(thing: dict[str, Any]) -> Any:
        return json.loads(json.dumps(thing).replace("sums", name))

    made = [named(each) for (kind, _), each in world.objects.items() if kind == "NetworkPolicy"]
    policies = [each | {"metadata": named(each["metadata"]) | {"namespace": "ml"}} for each in made]
    pods = [named(pod["metadata"]["labels"]) for pod in world.pods.values()]
    return policies, {labels[names.ROLE]: Pod(labels[names.ROLE], "ml", labels) for labels in pods}


def own_edges(policies: list[Policy], pods: dict[str, Pod], others: dict[str, Pod]) -> set[tuple[str, str, int]]:
    ports = (names.RANKS_PORT, 41234, 65535, names.MOVES_PORT, names.LINK_PORT)
    return {(one, o, p) for one in pods for o in others for p in ports if reaches(policies, pods[one], others[o], p)}


@needs_helm
@pytest.mark.parametrize(
    ("roles", "opened"),
    [
        ({}, set()),
        ({"generator": {"workers": 2}}, {"moves"}),
        ({"trainer": {"nodes": 2}}, {"ranks"}),
        ({"generator": {"weights": "group"}}, {"weights"}),
        (ALL_OWN, {"moves", "ranks", "weights"}),
    ],
)
def test_a_job_opens_the_ports_that_it_needs_to_its_own_pods_alone(roles: dict[str, Any], opened: set[str]) -> None:
    chart = policies_of()
    own, pods = of_job("sums", roles)
    others, other_pods = of_job("others", ALL_OWN)
    wanted = {
        (edge.source, edge.to, port)
        for ports in OWN_PORTS
        if ports.name in opened
        for edge in edges.own_edges()
        if edge.source in ports.roles and edge.to in ports.roles and edge.why.startswith(ports.why)
        for port in (names.RANKS_PORT, 41234, 65535, names.MOVES_PORT, names.LINK_PORT)
        if edge.port <= port <= edge.last
    }
    assert own_edges([*chart, *own, *others], pods, pods) == wanted
    assert own_edges([*chart, *own, *others], pods, other_pods) == set()
    assert own_edges([*chart, *own, *others], other_pods, pods) == set()
    assert own_edges(chart, pods, pods) == set(), "the chart opens them for no job"


def test_the_map_has_the_edges_that_a_run_needs() -> None:
    """Written by hand, so that an edge missing in the map is found."""
    found = {(edge.source, edge.to, edge.port) for edge in edges.edges()}
    by_grpc = {(source, "trainer", names.GRPC_PORT) for source in ("generator", "critic")}
    by_grpc |= {(source, to, names.GRPC_PORT) for source, to in
                (("generator", "critic"), ("critic", "generator"), ("generator", "generator"))}  # fmt: skip
    assert by_grpc | {
        ("control", "operator", names.REPORT_PORT), ("operator", "nats", names.NATS_PORT),
        ("operator", "redis", names.REDIS_PORT), ("operator", "api", 443), ("prompts", "nats", names.NATS_PORT),
        ("gateway", "nats", names.NATS_PORT), ("gateway", "generator", names.MOVES_PORT),
        ("control", "redis", names.REDIS_PORT), ("dashboard", "redis", names.REDIS_PORT),
        ("prometheus", "trainer", names.HTTP_PORT),
    } <= found  # fmt: skip
    assert not [edge for edge in found if edge[1] == "api" and edge[0] in names.ROLES]
    assert ("trainer", "generator", names.GRPC_PORT) not in found, "weights are fetched, not pushed"
    assert ("prepare", "nats", names.NATS_PORT) not in found
    own = {(edge.source, edge.to, edge.port) for edge in edges.own_edges()}
    assert own == {
        ("trainer", "trainer", names.RANKS_PORT), ("trainer", "generator", names.RANKS_PORT),
        ("generator", "trainer", names.RANKS_PORT), ("generator", "generator", names.RANKS_PORT),
        ("generator", "generator", names.MOVES_PORT),
    }  # fmt: skip
    lookers = {"control", "dashboard", "operator", "test"}
    assert {source for source, to, _ in found if to == "redis"} == lookers, "workers have nothing to do there"


@needs_helm
@pytest.mark.parametrize("stranger", [STRANGER, OTHERS_LABELS, part_of_release("nats", release="other")])
def test_a_pod_without_our_labels_reaches_nobody_and_nobody_reaches_it(stranger: Pod) -> None:
    policies = policies_of()
    for party in PARTIES:
        for port in PORTS:
            assert not allows(policies, party, stranger, port, "Ingress"), (party.name, port)
            assert not allows(policies, party, stranger, port, "Egress"), (party.name, port)


@needs_helm
def test_a_job_of_a_namespace_that_is_not_ours_reaches_no_server() -> None:
    policies = policies_of({"operator": {"jobNamespaces": ["team"]}})
    nats = part_of_release("nats")
    assert allows(policies, nats, job_pod("reward", namespace="team"), names.NATS_PORT, "Ingress")
    assert not allows(policies, nats, job_pod("reward", namespace="elsewhere"), names.NATS_PORT, "Ingress")
    trainer, generator = job_pod("trainer", namespace="team"), job_pod("generator", namespace="other-team")
    assert not reaches(policies, generator, trainer, names.GRPC_PORT), "jobs of two namespaces do not meet"


@needs_helm
def test_jobs_of_labelled_namespaces_alone_reach_the_servers() -> None:
    policies = policies_of({"operator": {"scope": "cluster", "namespaceLabel": "jobs.example/of=us"}})
    [nats] = [each for each in policies if each["metadata"]["name"] == "rlhfspec-nats"]
    peers = [peer for rule in nats["spec"]["ingress"] for peer in rule["from"]]
    peers = [peer for peer in peers if names.ROLE in peer["podSelector"]["matchLabels"]]
    assert len(peers) == len(edges.WORKERS)
    assert all(peer["namespaceSelector"] == {"matchLabels": {"jobs.example/of": "us"}} for peer in peers)


@needs_helm
def test_a_role_reaches_outside_addresses_only_where_values_allow_it() -> None:
    place = {"cidr": "203.0.113.0/24", "except": ["203.0.113.7/32"], "ports": [8000]}
    policies = policies_of({"networkPolicy": {"egress": {"reward": [place]}}})
    going = {name: _outside(policies, name) for name in ("reward", "prepare", "trainer", "generator")}
    assert going["reward"] == [({"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.7/32"]}}, 8000)]
    assert [port for _, port in going["prepare"]] == [443], "the hub, unless values say otherwise"
    assert going["trainer"] == going["generator"] == []


@needs_helm
def test_external_servers_are_reached_by_address_and_port() -> None:
    nats = {"url": "tls://nats.example:4333", "existingSecret": "mine", "cidrs": ["203.0.113.5/32"]}
    policies = policies_of({"nats": {"enabled": False, "external": nats}})
    assert _outside(policies, "reward") == [({"ipBlock": {"cidr": "203.0.113.5/32"}}, 4333)]


def _outside(policies: list[Policy], role: str) -> list[tuple[dict[str, Any], int]]:
    [policy] = [each for each in policies if each["metadata"]["name"] == f"rlhfspec-{role}"]
    rules = policy["spec"]["egress"]
    return [(to, port["port"]) for rule in rules for to in rule["to"] for port in rule["ports"] if "ipBlock" in to]


@needs_helm
def test_without_policies_there_are_none() -> None:
    assert policies_of({"networkPolicy": {"enabled": False}}) == []
