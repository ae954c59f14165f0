"""Base class and number types of a job's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MOST = (1 << 31) - 1
MOST_WORKERS = 10_000  # per stage; a cluster's operator allows fewer by default (`jobs.maxWorkers` of its chart)
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


class Mark(Enum):
    """A property of a field, or of all fields in a block."""

    MUTABLE = "may change while the job runs"
    MUTABLE_WHILE_SUSPENDED = "may change while the job is suspended; takes effect for the pods of the resumed job"
    RESUMABLE = "may differ when a run is resumed: it cannot change the curve"
    RECORDED = "may differ when a run is resumed: it changes the curve from there on, which the manifest records"
    CLUSTER_ONLY = "takes effect in a cluster only; ignored elsewhere"


def marked(block: type[Block], mark: Mark) -> Iterator[str]:
    """Yield the paths of fields with this mark, such as roles.generator.workers; a marked block is one path."""
    for field in block.model_fields.values():
        if mark in field.metadata:
            yield str(field.alias)
        else:
            inner = (path for each in blocks_of(field.annotation) for path in marked(each, mark))
            yield from (f"{field.alias}.{path}" for path in dict.fromkeys(inner))


def blocks_of(annotation: Any) -> list[type[Block]]:
    """Return the Block classes that a field may hold, directly, in a list or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return [annotation]
    return [block for inner in get_args(annotation) for block in blocks_of(inner)]
