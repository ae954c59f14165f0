"""One fresh cluster a module, of the kind that the module asks for.

CLUSTER = {"images": ["cpu"], "gpus": 2}    # what Cluster takes; a module without it gets two bare nodes

def test_it(cluster): ...
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, ControlPlane, why_no_nodes
from cluster.kind import KindCluster
from installed import Installed, on_the_laptop
from operators import define
from shared_servers import SharedServers


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci: the part that continuous integration runs (make e2e-ci)")
    config.addinivalue_line("markers", "own: needs what kind has not (audit log, nodes' insides)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "no kind on the PATH" if on_kind() and shutil.which("kind") is None else ""
    reason = reason or ("" if on_kind() else why_no_nodes())
    for item in items:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif on_kind() and item.get_closest_marker("own"):
            item.add_marker(pytest.mark.skip(reason="kind cannot do this"))


def on_kind() -> bool:
    return os.environ.get("E2E_CLUSTER") == "kind"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster | KindCluster]:
    wanted = getattr(request.module, "CLUSTER", {})
    with (KindCluster if on_kind() else Cluster)(**wanted) as running:
        yield running


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Installed:
    """With the chart; the module's CLUSTER has its images: `installed.IMAGES`."""
    with_chart = Installed(cluster)
    with_chart.install()
    return with_chart


@pytest.fixture(scope="module")
def laptop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the module's job `grpo()`, trained on this machine: a cluster's curve is compared with it."""
    return on_the_laptop(request.module.grpo(), tmp_path_factory.mktemp("laptop"))


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    """Without nodes, and it knows RLHFJobs: for operators that are processes of this machine."""
    with ControlPlane() as plane:
        define(plane)
        yield plane


@pytest.fixture(scope="module")
def servers() -> Iterator[SharedServers]:
    with tempfile.TemporaryDirectory() as folder, SharedServers(Path(folder)) as servers:
        yield servers
