"""What every block of a job is made of; for `rlhfspec.job` and its parts, which describe it.

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

MOST = (1 << 31) - 1
MOST_WORKERS = 10_000  # of a stage; a cluster's operator allows fewer by default (`jobs.maxWorkers` of its chart)
MOST_SECONDS = 10 * 366 * 86_400
Positive = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
WholeSeconds = Annotated[int, Field(ge=1, le=MOST_SECONDS)]


class Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, strict=True)
