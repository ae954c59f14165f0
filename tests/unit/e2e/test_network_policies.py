"""The rules that the test cluster's nodes get from NetworkPolicies: who may talk to whom, and nobody else."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import pytest
from cluster.policies import CHAIN, Pod, World, matches, pod_of, rules

WEB = Pod("shop", "web", "10.80.65.2", {"app": "web"}, {"http": 8080}, "node1")
DATABASE = Pod("shop", "db", "10.80.66.2", {"app": "db"}, {"sql": 5432}, "node2")
STRANGER = Pod("other", "stranger", "10.80.65.9", {"app": "web"}, {}, "node1")
PODS = (WEB, DATABASE, STRANGER)
NAMESPACES = {"shop": {"team": "shop"}, "other": {"team": "other"}}


def policy(selector: dict[str, Any], **spec: Any) -> dict[str, Any]:
    kinds = [each.capitalize() for each in spec]
    return {
        "metadata": {"namespace": "shop", "name": "p"},
        "spec": {"podSelector": selector, "policyTypes": kinds, **spec},
    }


def passes(policies: list[dict[str, Any]], source: str, target: str, port: int, protocol: str = "tcp") -> bool:
    """What the kernel would say of a new connection: the rules of the sender's node, then of the receiver's."""
    world = World(PODS, tuple(policies), NAMESPACES)
    nodes = {pod.node for pod in PODS if pod.address in (source, target)}
    return all(_walk(rules(world, node), CHAIN, source, target, port, protocol) for node in nodes)


def _walk(text: str, chain: str, *packet: Any) -> bool:
    for line in text.splitlines():
        if line.startswith(f"-A {chain} ") and "conntrack" not in line and _is_meant(line, *packet):
            goal = line.rpartition("-j ")[2]
            if goal in ("DROP", "RETURN"):
                return goal == "RETURN"
            if not _walk(text, goal, *packet):
                return False
    return True


def _is_meant(line: str, source: str, target: str, port: int, protocol: str) -> bool:
    options = dict(re.findall(r"(-s|-d|-p|--dport) (\S+)", line))
    first, _, last = options.get("--dport", f"{port}").partition(":")
    return (
        ipaddress.ip_address(source) in ipaddress.ip_network(options.get("-s", "0.0.0.0/0"))
        and ipaddress.ip_address(target) in ipaddress.ip_network(options.get("-d", "0.0.0.0/0"))
        and options.get("-p", protocol) == protocol
        and int(first) <= port <= int(last or first)
    )


def test_without_policies_everybody_talks() -> None:
    assert passes([], STRANGER.address, DATABASE.address, 5432)


def test_selected_means_denied_in_that_direction_only() -> None:
    denied = [policy({"matchLabels": {"app": "db"}}, ingress=[])]
    assert not passes(denied, WEB.address, DATABASE.address, 5432)
    assert passes(denied, DATABASE.address, WEB.address, 8080)
    assert passes(denied, STRANGER.address, WEB.address, 8080)


def test_an_empty_selector_means_the_policys_namespace() -> None:
    denied = [policy({}, ingress=[], egress=[])]
    assert not passes(denied, WEB.address, DATABASE.address, 5432)
    assert not passes(denied, STRANGER.address, WEB.address, 1)
    assert passes(denied, STRANGER.address, "8.8.8.8", 53)


def test_allows_add_up() -> None:
    db = {"matchLabels": {"app": "db"}}
    first = policy(db, ingress=[{"ports": [{"port": 1}]}])
    second = policy(db, ingress=[{"ports": [{"port": 2, "endPort": 4}]}])
    allowed = [port for port in range(1, 7) if passes([first, second], WEB.address, DATABASE.address, port)]
    assert allowed == [1, 2, 3, 4]


def test_both_ends_must_allow() -> None:
    into = policy(
        {"matchLabels": {"app": "db"}}, ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}]
    )
    out = policy({"matchLabels": {"app": "web"}}, egress=[])
    assert passes([into], WEB.address, DATABASE.address, 5432)
    assert not passes([into, out], WEB.address, DATABASE.address, 5432)


def test_a_pod_selector_alone_stays_in_its_namespace() -> None:
    def from_(peer: dict[str, Any]) -> bool:
        into = [policy({"matchLabels": {"app": "db"}}, ingress=[{"from": [peer]}])]
        return passes(into, STRANGER.address, DATABASE.address, 5432)

    web = {"matchLabels": {"app": "web"}}
    assert not from_({"podSelector": web})
    assert from_({"podSelector": web, "namespaceSelector": {"matchLabels": {"team": "other"}}})
    assert from_({"namespaceSelector": {}})
    assert not from_({"podSelector": {"matchLabels": {"app": "x"}}, "namespaceSelector": {}})


def test_a_block_has_holes() -> None:
    block = {"ipBlock": {"cidr": "10.80.0.0/16", "except": ["10.80.66.0/24"]}}
    out, into = [policy({}, egress=[{"to": [block]}])], [policy({}, ingress=[{"from": [block]}])]
    assert passes(out, WEB.address, STRANGER.address, 1)
    assert not passes(out, WEB.address, DATABASE.address, 1)
    assert passes(into, STRANGER.address, WEB.address, 1)
    assert not passes(into, DATABASE.address, WEB.address, 1)


def test_a_port_by_name_is_the_receivers() -> None:
    into = [policy({"matchLabels": {"app": "db"}}, ingress=[{"ports": [{"port": "sql"}]}])]
    assert passes(into, WEB.address, DATABASE.address, 5432)
    assert not passes(into, WEB.address, DATABASE.address, 8080)
    out = [policy({"matchLabels": {"app": "web"}}, egress=[{"to": [{"podSelector": {}}], "ports": [{"port": "sql"}]}])]
    assert passes(out, WEB.address, DATABASE.address, 5432)
    assert not passes(out, WEB.address, DATABASE.address, 8080)


def test_a_port_is_tcp_unless_it_says_udp() -> None:
    into = [policy({}, ingress=[{"ports": [{"port": 53, "protocol": "UDP"}]}])]
    assert passes(into, STRANGER.address, WEB.address, 53, "udp")
    assert not passes(into, STRANGER.address, WEB.address, 53, "tcp")


def test_selectors_that_are_expressions() -> None:
    def one(operator: str, *values: str) -> dict[str, Any]:
        return {"matchExpressions": [{"key": "app", "operator": operator, "values": list(values)}]}

    labels = {"app": "web"}
    assert matches(one("In", "web"), labels)
    assert not matches(one("NotIn", "web"), labels)
    assert matches(one("NotIn", "web"), {})
    assert matches(one("Exists"), labels)
    assert not matches(one("DoesNotExist"), labels)
    with pytest.raises(ValueError, match="unknown operator 'Gt'"):
        matches(one("Gt", "1"), labels)


def test_pods_without_an_address_of_their_own_have_no_rules() -> None:
    item = {
        "metadata": {"namespace": "shop", "name": "p"},
        "spec": {"containers": []},
        "status": {"podIP": "10.80.65.3"},
    }
    assert pod_of(item) is not None
    assert pod_of(item | {"status": {}}) is None
    assert pod_of(item | {"status": {"podIP": "10.80.65.3", "phase": "Succeeded"}}) is None
    assert pod_of(item | {"spec": {"containers": [], "hostNetwork": True}}) is None
