"""Links that carry KV to another generator (docs/moving.md), for `roles.generator.link`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rlhfspec.job.choices.registry import Entry, Registry, imported

AUTO = "auto"
_LINKS = "rlhfspec.moves.migration.links"


@dataclass(frozen=True, kw_only=True)
class LinkEntry(Entry):
    """Link. `make` returns the receiver's `LandingWay`; `connect` the sender's `Sending`, or None if unreachable."""

    connect: str  # module:name
    between: str  # one line, for the docs
    in_auto: bool = False  # offered when the job names none; the source takes the first that it can reach
    in_a_job: bool = True  # a job may name it
    platform: str = ""  # the only `sys.platform` that has it; empty: all

    @property
    def is_possible(self) -> bool:
        return self.platform in ("", sys.platform)

    def load_connect(self) -> Any:
        return imported(self.connect)


LINKS = Registry(
    "roles.generator.link",
    LinkEntry(
        name="memory",
        about="no transfer: the bytes stay where they were packed; only as part of `auto`",
        between="generators of one process",
        make=f"{_LINKS}.memory:MemoryWay",
        connect=f"{_LINKS}.memory:connect",
        in_auto=True,
        in_a_job=False,
    ),
    LinkEntry(
        name="shm",
        about="shared memory; Linux only",
        between="processes of one host and network namespace",
        make=f"{_LINKS}.shm:ShmWay",
        connect=f"{_LINKS}.shm:connect",
        in_auto=True,
        platform="linux",
    ),
    LinkEntry(
        name="tcp",
        about="one connection for each pair, with TLS where the run has certificates",
        between="hosts and pods",
        make=f"{_LINKS}.tcp:TcpWay",
        connect=f"{_LINKS}.tcp:TcpSending",
        in_auto=True,
    ),
    LinkEntry(
        name="nixl",
        about="one-sided reads; requires the package `nixl`",
        between="hosts with RDMA; also others, by UCX",
        make=f"{_LINKS}.nixl:NixlWay",
        connect=f"{_LINKS}.nixl:NixlSending",
    ),
    LinkEntry(
        name="torch",
        about="gloo, a group of two for each pair; for trusted networks only",
        between="processes that torch.distributed can connect",
        make=f"{_LINKS}.torch_link:TorchWay",
        connect=f"{_LINKS}.torch_link:TorchSending",
    ),
    beside=(AUTO,),
)
LINKS_OF_A_JOB = (AUTO, *LINKS.where(lambda entry: entry.in_a_job))
