"""Choice of the checkpoint to export."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.records.evaluations import best
from rlhfspec.runs.folder.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Choice:
    step: int
    why: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.why}"


def best_or_last(folder: RunFolder) -> Choice:
    """Return the checkpoint with the highest held-out reward, or the last if none was evaluated."""
    steps, evaluations = folder.checkpoint_steps(), folder.evaluations()
    there = [evaluation for evaluation in evaluations if evaluation.step in steps]
    if not there:
        return chosen(folder, "last")
    top = best(there)
    why = f"the best of {len(evaluations)} evaluations: held-out reward {top.reward.mean:.3g}"
    before = best(evaluations)
    if before.step != top.step:
        since = f"after step {before.step}" if before.step else "before training"
        why = f"the best of the evaluated checkpoints: held-out reward {top.reward.mean:.3g}; {since} it was "
        why += f"{before.reward.mean:.3g}"
    return Choice(top.step, why)


def chosen(folder: RunFolder, step: str) -> Choice:
    """Return the checkpoint of a step number, or the last one for "last"."""
    steps = folder.checkpoint_steps()
    if not steps:
        raise InvalidRequest("RUN", str(folder.path), "has no checkpoint")
    if step == "last":
        return Choice(steps[-1], "the last checkpoint")
    if not step.isdecimal() or int(step) not in steps:
        raise InvalidRequest("--step", step, f"must be last, or a step with a checkpoint: {', '.join(map(str, steps))}")
    return Choice(int(step), "as asked for")
