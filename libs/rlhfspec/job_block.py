"""What every block of a job is made of; for `rlhfspec.job` and `rlhfspec.job_cluster`, which describe it.

Example:
    >>> class Wait(Block):
    ...     max_seconds: Seconds = Field(1.0, description="The longest.")
    >>> Wait.model_validate({"maxSeconds": 2}).max_seconds
    2.0
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, strict=True)
