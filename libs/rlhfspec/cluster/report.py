"""Report of a job's `control` to the operator, at least every `AT_LEAST_SECONDS`.

Example:
    >>> Report(run="3a9d33b1", step=12, total_steps=100, reward=0.4).model_dump_json(exclude_defaults=True)
    '{"run":"3a9d33b1","step":12,"total_steps":100,"reward":0.4}'
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

AT_LEAST_SECONDS = 20.0
WorkerName = Annotated[str, Field(pattern=r"^[a-z]{1,32}-[0-9]{1,6}$")]


class ReportPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trouble(ReportPart):
    """Problem that delays the run, without messages of workers, because status readers may not read logs."""

    reason: Literal["BrokerUnavailable", "RewardFailing", "Stalled", "StorageFull", "RecordUndeliverable"]
    workers: tuple[WorkerName, ...] = Field((), max_length=64)


class Report(ReportPart):
    run: str = Field(max_length=64)  # its uid
    step: int = 0  # trained
    total_steps: int = 0  # smaller than in the job if the data ends before
    checkpoint_step: int = 0
    reward: float | None = None
    kl: float | None = None
    tokens_per_second: float | None = None
    accepted_per_verification: float | None = None
    eta_seconds: float | None = None
    generators_wanted: int | None = None  # advice of the rebalancer; None: no advice
    troubles: tuple[Trouble, ...] = Field((), max_length=16)
