"""NetworkPolicies as iptables rules: the pure part, from objects of the API server to the rules of one node.

A node's kernel sees every packet that goes to or from its pods in FORWARD (between two pods of one bridge too), after
Services have been resolved. Packets of the node itself, the kubelet's probes among them, go another way and are always
allowed, as Kubernetes promises.

    RLHF-POLICY    answers to what was allowed pass; then the two chains of each selected pod on this node
    RLHF-O-<hash>  of one pod: RETURN for each allow of what it sends, DROP at the end
    RLHF-I-<hash>  of one pod: the same for what it receives
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAIN = "RLHF-POLICY"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Pod:
    namespace: str
    name: str
    address: str
    labels: Labels
    ports: Mapping[str, int] = field(default_factory=dict)  # by name
    node: str = ""


@dataclass(frozen=True)
class World:
    """All pods that have an address of their own, policies as the API server has them, labels of namespaces."""

    pods: tuple[Pod, ...]
    policies: tuple[Mapping[str, Any], ...]
    namespaces: Mapping[str, Labels]


def pod_of(item: Mapping[str, Any]) -> Pod | None:
    """From the API's object; None for one that has no address (yet, any more, or shares its node's)."""
    status, spec, metadata = item.get("status", {}), item["spec"], item["metadata"]
    if not status.get("podIP") or spec.get("hostNetwork") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    ports = {
        port["name"]: port["containerPort"]
        for container in spec["containers"]
        for port in container.get("ports") or []
        if "name" in port
    }
    labels = metadata.get("labels") or {}
    return Pod(metadata["namespace"], metadata["name"], status["podIP"], labels, ports, spec.get("nodeName", ""))


def matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    """
    >>> matches({}, {"a": "1"}), matches({"matchLabels": {"a": "2"}}, {"a": "1"})
    (True, False)
    >>> matches({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, {})
    True
    """
    equal = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return equal and all(_matches_expression(each, labels) for each in selector.get("matchExpressions") or [])


def _matches_expression(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"matchExpressions: unknown operator {expression['operator']!r}")


def rules(world: World, node: str) -> str:
    """What iptables-restore is given, for the pods of this node."""
    chains: dict[str, list[str]] = {CHAIN: ["-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"]}
    for pod in sorted((pod for pod in world.pods if pod.node == node), key=lambda pod: pod.address):
        for direction, letter, own in (("Egress", "O", "-s"), ("Ingress", "I", "-d")):
            selecting = [policy for policy in world.policies if _selects(policy, pod, direction)]
            if selecting:
                name = f"RLHF-{letter}-{hashlib.sha256(pod.address.encode()).hexdigest()[:12]}"
                chains[CHAIN].append(f"{own} {pod.address} -j {name}")
                allows = {rule for policy in selecting for rule in _allows(world, policy, pod, direction)}
                chains[name] = [*sorted(allows), "-j DROP"]
    lines = [f":{name} - [0:0]" for name in chains]
    lines += [f"-A {name} {rule}" for name, each in chains.items() for rule in each]
    return "\n".join(["*mangle", *lines, "COMMIT", ""])


def _selects(policy: Mapping[str, Any], pod: Pod, direction: str) -> bool:
    spec = policy["spec"]
    # The API server fills in policyTypes.
    return (
        policy["metadata"]["namespace"] == pod.namespace
        and direction in spec.get("policyTypes", ["Ingress"])
        and matches(spec.get("podSelector") or {}, pod.labels)
    )


def _allows(world: World, policy: Mapping[str, Any], pod: Pod, direction: str) -> Iterator[str]:
    out = direction == "Egress"
    for rule in policy["spec"].get(direction.lower()) or []:
        peers = rule.get("to" if out else "from")
        for peer in _peers(world, policy["metadata"]["namespace"], peers):
            receivers = [pod] if not out else [each for each in world.pods if peer.address in ("", each.address)]
            for port in _ports(rule.get("ports"), receivers):
                ends = f"{'-d' if out else '-s'} {peer.address} " if peer.address else ""
                yield f"{ends}{peer.more}{port}-j RETURN"


@dataclass(frozen=True)
class _Peer:
    address: str  # an address, a block, or "" for everybody
    more: str = ""


def _peers(world: World, namespace: str, peers: Iterable[Mapping[str, Any]] | None) -> Iterator[_Peer]:
    if not peers:
        yield _Peer("")
        return
    for peer in peers:
        if block := peer.get("ipBlock"):
            yield from _block(block)
        else:
            yield from (_Peer(pod.address) for pod in world.pods if _is_peer(world, namespace, peer, pod))


def _block(block: Mapping[str, Any]) -> Iterator[_Peer]:
    """A block without its exceptions is the blocks that remain."""
    remaining = [ipaddress.ip_network(block["cidr"])]
    for hole in (ipaddress.ip_network(each) for each in block.get("except") or []):
        split: list[Any] = []
        for network in remaining:
            if hole.version == network.version and hole.subnet_of(network):  # type: ignore[arg-type]
                split += network.address_exclude(hole)  # type: ignore[arg-type]
            else:
                split.append(network)
        remaining = split
    yield from (_Peer(str(network)) for network in remaining if network.version == 4)


def _is_peer(world: World, namespace: str, peer: Mapping[str, Any], pod: Pod) -> bool:
    if (wanted := peer.get("namespaceSelector")) is not None:
        if not matches(wanted, world.namespaces.get(pod.namespace, {})):
            return False
    elif pod.namespace != namespace:
        return False
    return matches(peer.get("podSelector") or {}, pod.labels)


def _ports(ports: Iterable[Mapping[str, Any]] | None, receivers: Iterable[Pod]) -> Iterator[str]:
    """As iptables says them; "" for any. A name means what the receiving pod calls so."""
    if not ports:
        yield ""
        return
    for port in ports:
        protocol = f"-p {port.get('protocol', 'TCP').lower()} "
        number = port.get("port")
        if number is None:
            yield protocol
        elif isinstance(number, int):
            last = port.get("endPort", number)
            yield f"{protocol}--dport {number if last == number else f'{number}:{last}'} "
        else:
            yield from (f"{protocol}--dport {pod.ports[number]} " for pod in receivers if number in pod.ports)
