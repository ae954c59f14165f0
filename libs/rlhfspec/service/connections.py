"""How a process of a run reaches the others: one small file, made by whoever starts the run, read by every process.

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
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Connections(BaseModel):
    """`credentials`: a folder with ca.pem, and of each role (a stage's name, `view` or `control`) ROLE.pem and ROLE.key
    for TLS and ROLE.seed, its NKEY; None: neither is used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uid: str  # of this run, in every subject
    job_file: Path  # as it was resolved
    base_folder: Path  # of the job file as the user has it: relative paths begin here
    folder: Path  # the run's
    nats_url: str
    redis_url: str | None = None
    credentials: Path | None = None
    weights: Literal["file", "grpc"] = "file"
    weights_folder: Path | None = None  # of "file": in memory, such as /dev/shm
    otlp_endpoint: str | None = None
