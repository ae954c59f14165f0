"""Events of a job, as `kubectl describe` shows them: the same one is counted, not written again and again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rlhfspec.cluster import names
from rlhfspec.cluster.api import JOB_VERSION, Api, ApiResponse
from rlhfspec.operator.observed import JobView
from rlhfspec.operator.plan import Event

_QUIET_SECONDS = 300.0  # the same event is written once in so long
_MOST_KNOWN = 5000
LONGEST_MESSAGE = 1000


@dataclass(slots=True)
class _RecordedEvent:
    first: str
    count: int = 0
    written: float = float("-inf")


class EventRecorder:
    def __init__(self, api: Api, *, now: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._now = now
        self._said: OrderedDict[str, _RecordedEvent] = OrderedDict()

    async def say(self, job: JobView, event: Event) -> ApiResponse | None:
        """None: it was said not long ago."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        digest = hashlib.sha256(f"{job.uid}/{event.type}/{event.reason}/{event.message}".encode()).hexdigest()[:16]
        said = self._said.setdefault(digest, _RecordedEvent(at))
        self._said.move_to_end(digest)
        if len(self._said) > _MOST_KNOWN:
            self._said.popitem(last=False)
        said.count += 1
        if self._now() - said.written < _QUIET_SECONDS:
            return None
        said.written = self._now()
        about = {"apiVersion": JOB_VERSION, "kind": names.KIND, "namespace": job.namespace, "name": job.name}
        return await self._api.apply(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
                "involvedObject": about | {"uid": job.uid, "resourceVersion": job.resource_version},
                "type": event.type,
                "reason": event.reason,
                "message": event.message[:LONGEST_MESSAGE],
                "firstTimestamp": said.first,
                "lastTimestamp": at,
                "count": said.count,
                "source": {"component": names.FIELD_MANAGER},
                "reportingComponent": names.FIELD_MANAGER,
                "reportingInstance": names.FIELD_MANAGER,
            }
        )
