"""What a stage's builder gets beside the job: where the worker speaks, where weights are, where the run keeps things.

Torch-free, like every builder's module: what is heavy is imported when a service is built.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhfspec.job import RLHFJob
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.guest import HostedScoring
from rlhfspec.stage.vitals import Vitals

if TYPE_CHECKING:
    from rlhfspec.training.weights import WeightStore
    from rlhfspec.training.weights.group.sender import GroupSender
    from rlhfspec.worker.ends import MoveEndpoint
    from rlhfspec.worker.mirror import Mirror

KEPT_VERSIONS = 2  # of weights: the newest, and the one before it while others are still about to take that


def kept_versions(job: RLHFJob, stage: str = "trainer") -> int:
    """How many a store has. The trainer's has those that staleness allows to be in use besides; a generator's and a
    critic's, which hand on what they have received, are asked for the newest two at most."""
    return KEPT_VERSIONS + (job.spec.training.max_staleness if stage == "trainer" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a job. `uid`: of this start, in every subject. `base_folder`: the job file's. `folder`: the run's."""

    uid: str
    base_folder: Path
    folder: Path
    folder_is_kept_by: Literal["supervisor", "trainer"] = "supervisor"
    mirror: Mirror | None = None  # of the folder, where storage is an object store


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    worker: int
    bus: StageBus
    weights: WeightStore
    vitals: Vitals
    run: Run
    say: Callable[[str], None]  # a line for the person at the terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorContext(Context):
    """Context of a worker whose sequences may move, and which may score while it has no prompts."""

    move_endpoint: MoveEndpoint | None = None  # None: sequences stay
    hosted_scoring: HostedScoring | None = None  # None: there is no stage that it can help


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext(Context):
    """Context of a trainer in a process of its own."""

    at_end: ExitStack  # told what ended the process, once the service is closed
    group_sender: GroupSender | None = None  # None: weights go by the store alone
