"""Troubles that hold up a run, from worker signals. The wording is stable while a trouble lasts.

>>> [told] = failing({("reward", 0): Failing("reward 'judge': the endpoint answered 503", since=10.0)}, now=13.0)
>>> told.trouble.reason, told.trouble.workers, told.message
('RewardFailing', ('reward-0',), "reward 0: reward 'judge': the endpoint answered 503")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhfspec.cluster.report import Trouble
from rlhfspec.messages.loop import BY_NAME
from rlhfspec.runs.live.run_state import SILENT_SECONDS
from rlhfspec.runs.view.roster import ProcessState
from rlhfspec.stage.logs import without_secrets
from rlhfspec.stage.supervisor import is_overdue
from rlhfspec.stage.vitals import WorkerState
from rlhfspec.worker.exits import is_about_full_disk

LASTING_SECONDS = 2.0  # a call that succeeds on retry is no trouble
_MAX_EVIDENCE_CHARACTERS = 1000
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class Failing:
    what: str
    since: float


@dataclass(frozen=True, slots=True)
class TroubleEvidence:
    """Trouble with one line of evidence for control's log."""

    trouble: Trouble
    message: str


def broker_unavailable(url: str, since: str) -> TroubleEvidence:
    """Return the trouble of a lost broker. `since`: readable time of day."""
    return _told("BrokerUnavailable", f"{url} has not answered since {since}")


def failing(known: Mapping[tuple[str, int], Failing], now: float) -> list[TroubleEvidence]:
    """Return troubles of operations that workers keep retrying."""
    by_reason: dict[str, dict[str, str]] = {}
    for (stage, worker), each in sorted(known.items()):
        if now - each.since >= LASTING_SECONDS:
            reason = "StorageFull" if is_about_full_disk(each.what) else "RewardFailing"
            by_reason.setdefault(reason, {})[f"{stage}-{worker}"] = f"{stage} {worker}: {each.what}"
    return [_told(reason, _listed(list(told.values())), told) for reason, told in by_reason.items()]


def stalled(
    workers: Sequence[ProcessState], states: Sequence[WorkerState], *, quiet_seconds: float, stall_seconds: float
) -> list[TroubleEvidence]:
    """Return at most one trouble: some workers are silent or overdue, or all wait longer than `stall_seconds`."""
    late = [state for state in states if is_overdue(state)]
    told = [
        f"{state.stage} {state.worker}: {state.what} takes longer than its deadline of "
        f"{state.since_seconds - state.overdue_seconds:.0f} s"
        for state in late
    ]
    silent = [state for state in workers if state.doing == "silent"]
    told += [f"{state.name}: no heartbeat for {SILENT_SECONDS:.0f} s" for state in silent]
    waiting = [state for state in workers if state.doing == "waiting"]
    there = [state for state in workers if state.doing != "left"]
    if waiting and len(waiting) == len(there) and quiet_seconds > stall_seconds:
        ordered = sorted(waiting, key=lambda state: -state.since_seconds)
        waits = _listed([f"{state.name} for {state.what}{_from(state)}" for state in ordered])
        told.append(f"no worker has worked for {stall_seconds:.0f} s; waiting: {waits}")
    named = [f"{each.stage}-{each.worker}" for each in late] + [f"{each.stage}-{each.worker}" for each in silent]
    return [_told("Stalled", _listed(told), named)] if told else []


def undeliverable(letters: Iterable[str]) -> list[TroubleEvidence]:
    return [_told("RecordUndeliverable", letter) for letter in letters]


def _from(state: ProcessState) -> str:
    stage = BY_NAME.get(state.stage)
    return f", from {' or '.join(stage.unblocked_by)}" if stage and stage.unblocked_by else ""


def _listed(told: Sequence[str]) -> str:
    """Join messages, at most _MAX_LISTED of them.

    >>> _listed(["a", "b"]), _listed([str(number) for number in range(10)])
    ('a; b', '0; 1; 2; 3; 4; 5; 6; 7; and 2 more')
    """
    more = [f"and {len(told) - _MAX_LISTED} more"] if len(told) > _MAX_LISTED else []
    return "; ".join([*told[:_MAX_LISTED], *more])


def _told(reason: str, message: str, workers: Iterable[str] = ()) -> TroubleEvidence:
    line = " ".join(without_secrets(message).split())
    trouble = Trouble.model_validate({"reason": reason, "workers": tuple(dict.fromkeys(workers))[:_MAX_LISTED]})
    return TroubleEvidence(trouble, line[:_MAX_EVIDENCE_CHARACTERS])
