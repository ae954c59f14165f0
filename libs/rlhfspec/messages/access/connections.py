"""Addresses and credential files of a run's processes.

The file contains paths of secrets, but no secrets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.weight_stores import BETWEEN_PROCESSES, WEIGHT_STORES

if TYPE_CHECKING:  # a type checker cannot evaluate a Literal of a table's names
    WeightStoreName = str
else:
    WeightStoreName = Literal[BETWEEN_PROCESSES]


CLIENT_TOKEN = "serve.token"  # file beside the gateway's certificate
CLIENT_TOKEN_VARIABLE = "RLHFSPEC_SERVE_TOKEN"  # environment variable that replaces it


class Connections(BaseModel):
    """Connections of a run's processes.

    `credentials` is a folder with ca.pem and, for each role (a stage, `view` or `control`), ROLE.pem and ROLE.key for
    TLS and the NKEY ROLE.seed; None means no TLS and no NKEY. A cluster has ROLE.creds in place of ROLE.seed, and
    servers-ca.pem to verify the servers. `worker_host` is the name in every worker's certificate; None means addresses.
    Every worker listens on the ports at its own address (RLHFSPEC_HOST); 0 means any free port.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    uid: str  # of this run; part of every subject
    job_file: Path  # the resolved job
    base_folder: Path  # folder of the user's job file, where relative paths start
    folder: Path  # the run folder
    storage_uri: str | None = None  # object store that base_folder is a copy of; None: there is none
    nats_url: str
    redis_url: str | None = None
    credentials: Path | None = None
    weights: WeightStoreName = "file"
    weights_folder: Path | None = None  # for weights "file"; in memory, such as /dev/shm
    activity_folder: Path | None = None  # each worker records its current work here, read after its death
    otlp_endpoint: str | None = None
    http_port: int = Field(0, ge=0, lt=1 << 16)
    grpc_port: int = Field(0, ge=0, lt=1 << 16)
    moves_port: int = Field(0, ge=0, lt=1 << 16)
    link_port: int = Field(0, ge=0, lt=1 << 16)
    serve_port: int | None = Field(None, ge=0, lt=1 << 16)  # of the gateway; None: there is none
    worker_host: str | None = None
    folder_is_kept_by: Literal["supervisor", "trainer"] = "supervisor"  # holds the folder's lock and records the end
    report_url: str | None = None  # where `control` reports the state of the run
    supervisor_address: str | None = None  # host:port of its /metrics, on one machine

    @model_validator(mode="after")
    def _has_a_place_for_weights(self) -> Self:
        for need in WEIGHT_STORES[self.weights].needs:
            if getattr(self, need) is None:
                raise ValueError(f"{need} must be set where weights is {self.weights}")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        return _parsed(cls, path, "--connections", "is not a connections file")

    def job(self) -> RLHFJob:
        return _parsed(RLHFJob, self.job_file, "job_file", "is not a resolved job")


def client_token_file(credentials: Path) -> Path:
    """Return the file with the token of the gateway's clients."""
    return credentials / CLIENT_TOKEN


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
