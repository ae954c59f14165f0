"""The phase of a job: one word for what its conditions say in full. The first one that holds.

Example:
    >>> list(PHASES)[:3]
    ['Terminating', 'Succeeded', 'Failed']
"""

from __future__ import annotations

from rlhfspec.cluster import names
from rlhfspec.operator import kueue
from rlhfspec.operator.draft import Draft

PHASES = {
    "Terminating": "It was deleted, and its pods are being ended.",
    "Succeeded": "Its last step is trained.",
    "Failed": "It cannot go on; the reason says why.",
    "Suspending": "It was asked to pause, or Kueue evicted it: its pods are being ended, the trainer's first, after a "
    "checkpoint.",
    "Suspended": "It paused. Nothing of it runs.",
    "Pending": "Nothing of it runs yet, or Kueue lets it wait.",
    "Preparing": "`prepare` checks it and makes its run folder.",
    "Running": "All its pods have been ready, and it trains.",
    "Starting": "Its pods start, or it is started again as a whole.",
}


def phase_of(draft: Draft) -> str:
    memory = draft.memory
    suspend = draft.job.job is not None and draft.spec.suspend
    prepare = draft.by_key.get((names.PREPARE, 0))
    is_preparing = memory.state == "open" and not memory.prepared
    rules = (
        ("Terminating", draft.job.deleting_since is not None),
        (memory.outcome.type if memory.outcome else "", memory.outcome is not None),
        ("Suspending", memory.state == "closing" and (suspend or kueue.withdraws(draft))),
        ("Suspended", memory.state == "closed" and suspend),
        ("Pending", memory.state == "closed"),
        ("Pending", is_preparing and (prepare is None or prepare.node is None)),
        ("Preparing", is_preparing),
        ("Running", memory.state == "open" and memory.running_since is not None),
    )
    return next((phase for phase, holds in rules if holds), "Starting")
