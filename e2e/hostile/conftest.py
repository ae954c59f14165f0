"""One control plane and one operator for all that a hostile tenant does here: she may do anything in her own
namespaces. After each of her acts nothing of another tenant's has been read, changed, deleted or delayed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
from calm import Calm
from cluster import ControlPlane
from operators import RELEASE_NAMESPACE, Operator, World, acting, define, grant, until
from shared_servers import SharedServers
from tenant import CALM, HOSTILE, Tenant, belongings, settle_calm, trespasses

DOOMED = ("doomed-background", "doomed-foreground", "doomed-orphan")
NAMESPACES = (CALM, "probes", HOSTILE, "locked", *DOOMED)


@pytest.fixture(scope="package")
def kubernetes() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        define(plane)
        yield plane


@pytest.fixture(scope="package")
def servers() -> Iterator[SharedServers]:
    with TemporaryDirectory() as folder, SharedServers(Path(folder)) as servers:
        yield servers


@pytest.fixture(scope="package")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, CALM, "probes"):
        world.namespace(name)
    return world


@pytest.fixture(scope="package")
def tenant(kubernetes: ControlPlane, world: World) -> Tenant:
    return Tenant(kubernetes, "locked", *DOOMED)


@pytest.fixture(scope="package")
def operator(
    kubernetes: ControlPlane, world: World, tenant: Tenant, servers: SharedServers, tmp_path_factory: Any
) -> Iterator[Operator]:
    kubeconfig = grant(kubernetes, NAMESPACES)
    with acting(
        Operator(tmp_path_factory.mktemp("operator") / "a", kubeconfig, servers, namespaces=NAMESPACES)
    ) as operator:
        yield operator


@pytest.fixture(scope="package")
def calm(world: World, operator: Operator) -> Calm:
    settle_calm(world)
    return Calm(world, operator, "probes")


@pytest.fixture(scope="package", autouse=True)
def nobody_trespassed(kubernetes: ControlPlane, calm: Calm) -> Iterator[None]:
    since = datetime.now(UTC)
    yield
    assert trespasses(kubernetes.audit(), since) == []


@pytest.fixture(autouse=True)
def unmoved(world: World, operator: Operator, calm: Calm) -> Iterator[None]:
    before, memory, log = belongings(world), operator.rss_bytes, len(operator.log)
    with calm.goes_on():
        yield
    assert operator.process.poll() is None, operator.log[-3000:]
    assert belongings(world) == before
    assert operator.log.count("acts: holds") == 1, "the Lease was lost"
    said = operator.log[log:]
    unforeseen = [line for line in said.splitlines() if "Traceback" in line and "cannot be decided" not in line]
    assert not unforeseen, unforeseen[0]
    assert operator.rss_bytes - memory < 100 * 1024**2


@pytest.fixture
def job(request: pytest.FixtureRequest, tenant: Tenant) -> Iterator[str]:
    """A name for one, which is gone in the end."""
    name = f"act-{crc32(request.node.name.encode()):x}"
    yield name
    if not tenant.is_gone(name):
        tenant.delete(name)
    until(lambda: tenant.is_gone(name), f"{name} is gone", seconds=20)
