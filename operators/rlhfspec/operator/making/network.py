"""NetworkPolicies that open ports between a job's pods; the chart's policies deny the rest.

Example:
    >>> [port.name for port in OWN_PORTS]
    ['ranks', 'weights', 'moves']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.messages.loop import STAGES
from rlhfspec.messages.records import Move
from rlhfspec.operator.deciding.situation import Situation
from rlhfspec.operator.making.pods import num_gpus

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class OwnPorts:
    """Ports that are open between pods of `roles` within one job."""

    name: str
    roles: tuple[str, ...]
    first: int
    last: int
    why: str


_MOVERS = tuple(stage.name for stage in STAGES if Move in stage.watches)
_RANKS = OwnPorts("ranks", ("trainer",), names.RANKS_PORT, _LAST_PORT, "ranks of several nodes")
_WEIGHTS = OwnPorts("weights", ("trainer", "generator"), names.RANKS_PORT, _LAST_PORT, "weights by a process group")
_MOVES = OwnPorts("moves", _MOVERS, names.MOVES_PORT, names.LINK_PORT, "moves of sequences and their KV cache")
OWN_PORTS = (_RANKS, _WEIGHTS, _MOVES)


def policies(known: Situation, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the NetworkPolicies that a job needs."""
    if not known.settings.network_policies:
        return []
    roles = known.spec.roles
    way = roles.generator.weights
    needed = {
        _RANKS: roles.trainer.nodes > 1,
        _WEIGHTS: way == "group" or (way == "auto" and all(num_gpus(known, role) for role in _WEIGHTS.roles)),
        _MOVES: roles.generator.workers > 1 or roles.generator.replicas is not None,
    }
    return [_policy(known, ports, metadata) for ports, is_needed in needed.items() if is_needed]


def _policy(known: Situation, ports: OwnPorts, metadata: Mapping[str, Any]) -> dict[str, Any]:
    pods = {
        "matchLabels": {names.MANAGED_BY: names.FIELD_MANAGER, names.JOB: known.job.name},
        "matchExpressions": [{"key": names.ROLE, "operator": "In", "values": list(ports.roles)}],
    }
    opened = [{"protocol": "TCP", "port": ports.first, "endPort": ports.last}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {**metadata, "name": names.policy_name(ports.name, known.job.name, known.job.uid)},
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods}], "ports": opened}],
            "egress": [{"to": [{"podSelector": pods}], "ports": opened}],
        },
    }
