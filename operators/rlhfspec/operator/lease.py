"""Leader election: a replica acts only while it certainly holds the Lease.

| replica | action |
|---|---|
| holder | renews every RENEW_SECONDS; acts until ACT_SECONDS after its last renewal *began* |
| others | read every LEADER_LOOK_SECONDS; take a Lease not renewed for LEADER_LEASE_SECONDS by their own clock |

Clocks of machines are never compared. ACT_SECONDS < LEADER_LEASE_SECONDS, and a holder counts from before its write,
the others from after they saw it. So even a paused holder stops before another begins. The `resourceVersion` lets only
one replica take the Lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from rlhfspec.cluster.api import Api, ApiResponse

LEADER_LEASE_SECONDS, RENEW_SECONDS, LEADER_LOOK_SECONDS = 10.0, 3.0, 1.0
ACT_SECONDS = 8.0
LOG = logging.getLogger(__name__)


def seconds_awake_or_asleep() -> float:
    """Return monotonic seconds that include the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, *, now: Callable[[], float] = seconds_awake_or_asleep
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._now = now
        self._acts_until = float("-inf")
        self._seen: tuple[str, float] = ("", float("-inf"))  # resourceVersion, and when it was first seen
        self._ours: dict[str, Any] | None = None  # last write of this replica
        self._is_over = False
        self.changed = asyncio.Event()  # set whenever the Lease is won or lost

    @property
    def is_held(self) -> bool:
        """Return whether this replica may write; check it right before every write."""
        return not self._is_over and self._now() < self._acts_until

    @property
    def was_seen(self) -> bool:
        """Return whether the Lease was read or written once."""
        return bool(self._seen[0]) or self.is_held

    async def run(self) -> None:
        """Renew or try to take the Lease until cancelled."""
        was_held = False
        while True:
            began = self._now()
            await self.attempt()
            if self.is_held != was_held:
                was_held = self.is_held
                LOG.info("%s the Lease %s", "acts: holds" if was_held else "stands by: does not hold", self._name)
                self.changed.set()
            # Counted from the start of the attempt: after a slow one the next follows at once.
            await asyncio.sleep(began + (RENEW_SECONDS if was_held else LEADER_LOOK_SECONDS) - self._now())

    async def attempt(self) -> None:
        """Renew the Lease, or take it if it is free."""
        began = self._now()
        try:
            async with asyncio.timeout(RENEW_SECONDS):
                await self._renew(began)
        except (aiohttp.ClientError, TimeoutError) as error:
            LOG.warning("the Lease %s cannot be reached: %s %s", self._name, type(error).__name__, error)

    async def _renew(self, began: float) -> None:
        """Write the Lease, valid from `began`, after reading it unless the last write succeeded."""
        last, self._ours = self._ours, None
        if last is None:
            answer = await self._api.lease("GET", self._namespace, self._name)
            if answer.is_refused and not answer.is_missing:
                LOG.warning("the Lease %s cannot be read: %s", self._name, answer.message)
                return
            if not answer.is_missing and not self._is_free(answer):
                self._acts_until = float("-inf")
                return
            last = {} if answer.is_missing else answer.body
        method = "PUT" if last else "POST"
        taken = await self._api.lease(method, self._namespace, self._name, self._written(last))
        if not taken.is_refused:
            self._ours, self._acts_until = taken.body, began + ACT_SECONDS
            return
        if taken.code in (404, 409):  # it was taken or deleted
            self._acts_until = float("-inf")
        else:
            LOG.warning("the Lease %s cannot be written: %s", self._name, taken.message)

    def _is_free(self, answer: ApiResponse) -> bool:
        """Return whether the Lease is released, expired by the local clock, or held by this replica."""
        holder = answer.body["spec"].get("holderIdentity")
        version = answer.body["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = (version, self._now())
        return holder in (self._identity, "", None) or self._now() - self._seen[1] > LEADER_LEASE_SECONDS

    def _written(self, last: dict[str, Any]) -> dict[str, Any]:
        """Return the Lease that replaces `last`."""
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec = last.get("spec", {})
        holder = "" if self._is_over else self._identity
        is_same = spec.get("holderIdentity") == holder
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": last.get("metadata", {"name": self._name, "namespace": self._namespace}),
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": round(LEADER_LEASE_SECONDS),
                "acquireTime": spec.get("acquireTime", now) if is_same else now,
                "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + (not is_same and bool(last)),
            },
        }

    async def release(self) -> None:
        """Release the Lease, after `run` and all writes have ended."""
        was_held, self._is_over = self.is_held, True
        if not was_held:
            return
        last = self._ours or (await self._api.lease("GET", self._namespace, self._name)).body
        if last.get("spec", {}).get("holderIdentity") == self._identity:
            await self._api.lease("PUT", self._namespace, self._name, self._written(last))
