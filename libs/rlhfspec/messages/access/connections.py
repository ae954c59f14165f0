"""How a process of a run reaches the others: one small file, made by what starts the run, read by every process.

It holds names of files with secrets, never a secret, so its path may stand in an argument list.

Example:
    >>> Connections.model_validate_json('{"nats_url": "nats://127.0.0.1:4222"}')
    Traceback (most recent call last):
        ...
    pydantic_core._pydantic_core.ValidationError: 4 validation errors for Connections
    ...
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.weight_stores import BETWEEN_PROCESSES, WEIGHT_STORES

if TYPE_CHECKING:  # the names are of a table that a type checker does not run
    WeightStoreName = str
else:
    WeightStoreName = Literal[BETWEEN_PROCESSES]


class Connections(BaseModel):
    """`credentials`: a folder with ca.pem, and of each role (a stage's name, `view` or `control`) ROLE.pem and ROLE.key
    for TLS and ROLE.seed, its NKEY; None: neither is used. In a cluster ROLE.creds is there in place of ROLE.seed, and
    servers-ca.pem, which the servers' certificates are verified by (`service.credentials`).

    `worker_host`: the name in the certificate of every worker, where their addresses are not known beforehand; None:
    their addresses are in it. The ports are those that every worker listens at, on an address of its own (in the
    environment, RLHFSPEC_HOST); 0: any that is free."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uid: str  # of this run, in every subject
    job_file: Path  # as it was resolved
    base_folder: Path  # of the job file as the user has it: relative paths begin here
    folder: Path  # the run's
    storage_uri: str | None = None  # of the object store that base_folder is a copy of; None: it is the storage itself
    nats_url: str
    redis_url: str | None = None
    credentials: Path | None = None
    weights: WeightStoreName = "file"
    weights_folder: Path | None = None  # of "file": in memory, such as /dev/shm
    activity_folder: Path | None = None  # in which each worker notes what it is at, for the process that sees it die
    otlp_endpoint: str | None = None
    http_port: int = Field(0, ge=0, lt=1 << 16)
    grpc_port: int = Field(0, ge=0, lt=1 << 16)
    moves_port: int = Field(0, ge=0, lt=1 << 16)
    link_port: int = Field(0, ge=0, lt=1 << 16)
    worker_host: str | None = None
    folder_is_kept_by: Literal["supervisor", "trainer"] = "supervisor"  # what holds its lock, and writes how it ended
    report_url: str | None = None  # to which `control` reports how the run goes
    supervisor_address: str | None = None  # host:port of its /metrics, on one machine

    @model_validator(mode="after")
    def _has_a_place_for_weights(self) -> Self:
        for need in WEIGHT_STORES[self.weights].needs:
            if getattr(self, need) is None:
                raise ValueError(f"{need} must be set where weights is {self.weights}")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """InvalidRequest in one line when this is no such file."""
        return _parsed(cls, path, "--connections", "is no connections file")

    def job(self) -> RLHFJob:
        """The job as it was resolved."""
        return _parsed(RLHFJob, self.job_file, "job_file", "is no resolved job")


_M = TypeVar("_M", bound=BaseModel)


def _parsed(model: type[_M], path: Path, field: str, problem: str) -> _M:
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(field, str(path), f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first, *_ = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(field, str(path), f"{problem}: {where + ': ' if where else ''}{first['msg']}") from None
