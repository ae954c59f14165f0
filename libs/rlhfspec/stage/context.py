"""Context of a stage's builder, free of torch."""

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
    from rlhfspec.moves.migration.base import MoveControl
    from rlhfspec.training.weights import WeightStore
    from rlhfspec.training.weights.group.sender import GroupSender
    from rlhfspec.worker.ends import MoveEndpoint
    from rlhfspec.worker.mirror import Mirror

KEPT_VERSIONS = 2  # the newest version and the one before, which others may still be loading


def kept_versions(job: RLHFJob, stage: str = "trainer") -> int:
    """Return the number of weights versions to keep: two, plus the allowed staleness for the trainer."""
    return KEPT_VERSIONS + (job.spec.training.max_staleness if stage == "trainer" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run of a job; `base_folder` is the job file's folder, `folder` the run's."""

    uid: str
    base_folder: Path
    folder: Path
    folder_is_kept_by: Literal["supervisor", "trainer"] = "supervisor"
    mirror: Mirror | None = None  # of the folder, if storage is an object store


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    worker: int
    bus: StageBus
    weights: WeightStore
    vitals: Vitals
    run: Run
    say: Callable[[str], None]  # shows a line to the user


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorContext(Context):
    move_endpoint: MoveEndpoint | None = None  # None: sequences stay
    hosted_scoring: HostedScoring | None = None  # None: no stage that it can help
    is_called: bool = False  # by the gateway, over `move_endpoint`


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext(Context):
    control: MoveControl  # asks generators
    host: str
    port: int
    token: str  # of clients


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext(Context):
    at_end: ExitStack  # closed after the service, with the error that ended the process
    group_sender: GroupSender | None = None  # None: weights travel through the store only
