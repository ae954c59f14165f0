"""Who may reach whom: the edges that the chart's NetworkPolicies allow, derived from THE MAP and a cluster's names.

A party is a role of a job, a component of the release, or somebody outside: `dns`, `api` and `prometheus` are values of
the chart. Every party gets one policy with its edges in and out; all else is denied.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlhfspec.cluster import names
from rlhfspec.messages.loop import GATEWAY, SUPERVISED
from rlhfspec.operator.making.network import OWN_PORTS
from rlhfspec.worker.worker_weights import READERS

WORKERS = (names.CONTROL, *(stage.name for stage in SUPERVISED))  # they run while the job does
COMPONENTS = ("operator", "nats", "redis", "dashboard", "install", "test")
OUTSIDE = ("dns", "api", "prometheus")


@dataclass(frozen=True, slots=True)
class Edge:
    source: str
    to: str
    port: int
    why: str
    last: int = 0  # of several ports from that one on


DNS_PORTS = (53, 5353)  # a policy counts the pod's own port, behind the Service; OpenShift's DNS listens at the second


def edges() -> list[Edge]:
    """Sorted, each once.

    >>> [edge.source for edge in edges() if edge.to == "trainer" and edge.port == names.GRPC_PORT]
    ['critic', 'generator']
    """
    found = {*_to_servers(), *_between_workers(), *_of_the_release()}
    return sorted(found, key=lambda edge: (edge.source, edge.to, edge.port))


def _to_servers() -> list[Edge]:
    found = [Edge(role, "dns", port, "names") for role in names.ROLES for port in DNS_PORTS]
    for worker in WORKERS:
        found.append(Edge(worker, "nats", names.NATS_PORT, "records"))
        found.append(Edge("prometheus", worker, names.HTTP_PORT, "metrics"))
    return found


def _between_workers() -> list[Edge]:
    """Return the edges of weights and calls. What only pods of one job may reach is the operator's (`own_edges`)."""
    found = [Edge(reader, giver, names.GRPC_PORT, "weights") for reader in READERS for giver in ("trainer", *READERS)]
    return [*found, Edge(GATEWAY.name, "generator", names.MOVES_PORT, "calls of clients")]


def _of_the_release() -> list[Edge]:
    reports = [Edge(source, "operator", names.REPORT_PORT, "reports") for source in (names.CONTROL, "test")]
    askers = [Edge(source, "api", 443, "the API server") for source in ("operator", "dashboard", "install")]
    lookers = [Edge(source, "nats", names.NATS_PORT, "records") for source in ("operator", "dashboard", "test")]
    lookers_at_live = (names.CONTROL, "operator", "dashboard", "test")
    live = [Edge(source, "redis", names.REDIS_PORT, "live state") for source in lookers_at_live]
    askers_of_names = ("operator", "dashboard", "install", "test")
    named = [Edge(source, "dns", port, "names") for source in askers_of_names for port in DNS_PORTS]
    return [*reports, *askers, *lookers, *live, *named, Edge("prometheus", "operator", names.HTTP_PORT, "metrics")]


def own_edges() -> list[Edge]:
    """Return the edges between pods of one job, which the operator opens for the jobs that need them.

    >>> [(edge.source, edge.to, edge.port) for edge in own_edges() if "rank" in edge.why]
    [('trainer', 'trainer', 29500)]
    """
    return [
        Edge(source, to, ports.first, f"{ports.why}; within a job that needs it", last=ports.last)
        for ports in OWN_PORTS
        for source in ports.roles
        for to in ports.roles
    ]


def as_file() -> dict[str, object]:
    """files/edges.yaml: what the templates read."""
    return {
        "roles": list(names.ROLES),
        "components": list(COMPONENTS),
        "edges": [{name: value for name, value in asdict(edge).items() if value} for edge in edges()],
    }
