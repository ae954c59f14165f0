"""A real Kubernetes for tests, without Docker: see ../README.md."""

from cluster.control_plane import ControlPlane
from cluster.processes import StartFailed
from cluster.requirements import why_no_control_plane, why_no_kueue, why_no_nodes
from cluster.tools import ToolFailed
from cluster.whole import Cluster

__all__ = [
    "Cluster",
    "ControlPlane",
    "StartFailed",
    "ToolFailed",
    "why_no_control_plane",
    "why_no_kueue",
    "why_no_nodes",
]
