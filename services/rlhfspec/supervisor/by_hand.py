"""Workers that are started by hand, from another shell: they join a run, and are gone when nothing is heard of them.

Example:
    >>> from rlhfspec.messages.transport.clock import FakeClock
    >>> known = KnownRun(FakeClock())
    >>> info = WorkerInfo(
    ...     id="w", job="sums", stage="reward", worker=1, host="here", pid=71, grpc_address="", http_address=""
    ... )
    >>> joined(known, info), joined(known, info), gone(known)
    (True, False, [])
"""

from __future__ import annotations

from dataclasses import replace

from rlhfspec.messages.records import WorkerInfo
from rlhfspec.runs.live.run_state import KnownRun, ProcessNews


def joined(known: KnownRun, info: WorkerInfo) -> bool:
    """Tell that a worker is ready; return whether it is one that nothing here started, and is new."""
    worker = known.run.workers.get((info.stage, info.worker))
    is_new = worker is None or worker.process is None or (worker.is_by_hand and worker.phase == "left")
    if is_new:
        known.tell(ProcessNews(stage=info.stage, worker=info.worker, phase="starting", by_hand=True))
    known.tell(info)
    return is_new


def gone(known: KnownRun) -> list[str]:
    """Tell, and return by name, which of them have left, or are not heard of any more; each once."""
    now = known.clock.now()
    left = [each for each in known.run.there if each.is_by_hand and (each.has_stopped or each.is_silent(now))]
    known.tell(*(replace(each.process, phase="left") for each in left if each.process is not None))
    return [f"{each.stage} {each.worker}" for each in left]
