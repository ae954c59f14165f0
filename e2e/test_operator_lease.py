"""Of two replicas never both hold the Lease, whatever happens to them: on a real API server, by clocks of our own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from cluster import ControlPlane

from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api, ApiResponse
from rlhfspec.errors import LeadershipLost
from rlhfspec.operator.lease import LEADER_LEASE_SECONDS, LEADER_LOOK_SECONDS, RENEW_SECONDS, Lease

pytestmark = pytest.mark.ci
LIVES, LIFE_SECONDS, STEP_SECONDS = 15, 240.0, 0.1


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    with ControlPlane(controllers=False) as plane, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(plane.kubeconfig))
        yield plane


class World:
    """The time, and what the replicas do in it; one may be at it while the other waits for an answer."""

    def __init__(self, api: Api, name: str, draw: random.Random) -> None:
        self.draw = draw
        self.time = 0.0
        self.num_won = 0
        road: Any = Road(api, self)
        self.replicas = [Lease(road, "default", name, each, now=lambda: self.time) for each in ("a", "b")]
        self._due = [0.0, 0.0]
        self._busy = [False, False]
        self._holder: Lease | None = None

    async def pass_seconds(self, seconds: float) -> None:
        """In small steps: nobody holds it together with another, however short."""
        for _ in range(round(seconds / STEP_SECONDS)):
            self.time += STEP_SECONDS
            holders = [replica for replica in self.replicas if replica.is_held]
            assert len(holders) <= 1, f"two hold it at {self.time}"
            if holders and holders[0] is not self._holder:
                self.num_won, self._holder = self.num_won + 1, holders[0]
            for number, replica in enumerate(self.replicas):
                if not self._busy[number] and self._due[number] <= self.time:
                    await self._attempt(number, replica)

    async def _attempt(self, number: int, replica: Lease) -> None:
        self._busy[number] = True
        await replica.attempt()
        self._busy[number] = False
        pause = self.draw.choice([0.0] * 6 + [12.0, 30.0])  # it was stopped, or its machine slept
        self._due[number] = self.time + (RENEW_SECONDS if replica.is_held else LEADER_LOOK_SECONDS) + pause


class Road:
    """An Api on a road where requests and answers are late or lost."""

    def __init__(self, api: Api, world: World) -> None:
        self._api, self._world = api, world

    async def lease(self, method: str, namespace: str, name: str, body: dict[str, Any] | None = None) -> ApiResponse:
        draw = self._world.draw
        if draw.random() < 0.1:
            raise aiohttp.ClientConnectionError("the request is lost")
        await self._world.pass_seconds(draw.choice([0.0, 0.0, 0.2, 3.0]))
        answer = await self._api.lease(method, namespace, name, body)
        await self._world.pass_seconds(draw.choice([0.0, 0.0, 0.0, 0.2, 7.0]))
        if draw.random() < 0.1:
            raise aiohttp.ClientConnectionError("the answer is lost")
        return answer


def test_two_replicas_never_both_hold_it(kubernetes: ControlPlane) -> None:
    async def lives() -> list[int]:
        """How often it was won in each."""
        won = []
        async with Api(KubeAccess()) as api:
            for seed in range(LIVES):
                world = World(api, f"lease-{seed}", random.Random(seed))
                await world.pass_seconds(LIFE_SECONDS)
                won.append(world.num_won)
        return won

    won = asyncio.run(lives())
    assert sum(won) > 3 * LIVES, f"it hardly ever changed hands, which shows nothing: {won}"


def test_a_released_lease_is_free_at_once(kubernetes: ControlPlane) -> None:
    async def handed_over() -> tuple[bool, bool, bool]:
        async with Api(KubeAccess()) as api:
            first, second = (Lease(api, "default", "given-back", name) for name in ("a", "b"))
            await first.attempt()
            await second.attempt()
            before = second.is_held
            await first.release()
            await second.attempt()
            return before, first.is_held, second.is_held

    assert asyncio.run(handed_over()) == (False, False, True)


def test_a_replica_without_the_lease_cannot_write(kubernetes: ControlPlane) -> None:
    """Not even what it had begun: the question is asked before every try."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "written", "namespace": "default"}}
    time = 0.0

    async def late() -> None:
        nonlocal time
        async with Api(KubeAccess()) as api:
            lease = Lease(api, "default", "fence", "a", now=lambda: time)
            await lease.attempt()
            async with Api(KubeAccess(), may_write=lambda: lease.is_held) as writing:
                assert not (await writing.apply(config)).is_refused
                time = LEADER_LEASE_SECONDS
                with pytest.raises(LeadershipLost):
                    await writing.apply(config | {"data": {"too": "late"}})
                assert "data" not in (await writing.get("v1", "ConfigMap", "default", "written")).body

    asyncio.run(late())
