"""A process's connection to NATS as a role of the run, with whatever credentials the run has for it.

transport = await connect(connections, "reward", name="reward-0", clock=clock)
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.messages.servers.credentials.certificates import LIFETIME, servers_tls
from rlhfspec.messages.servers.given import NATS, GivenServer, given_server
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.messages.transport.jetstream.proof import NO_PROOF, NatsProof, proof_of
from rlhfspec.messages.transport.jetstream.streams import FOR_EVER, Keeping
from rlhfspec.messages.transport.nats import NatsTransport

MAX_PENDING = 8192  # messages; as of NatsTransport
KEEP_SECONDS = LIFETIME.total_seconds()  # longer than any message waits in a run that goes on
ON_A_GIVEN_SERVER = Keeping(work_seconds=KEEP_SECONDS, state_seconds=KEEP_SECONDS)
GIVEN_INBOX = "_INBOX"  # every client's: what users of a server may listen to in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """How a role speaks with NATS. `inbox_prefix`: no other role hears its answers, but on a given server all roles
    are one user. `keeping`: of what it declares; a server that outlives its runs forgets what one of them left
    behind."""

    proof: NatsProof
    tls: ssl.SSLContext | None
    inbox_prefix: str
    keeping: Keeping = FOR_EVER


def access_of(folder: Path | None, role: str, uid: str) -> NatsAccess:
    """By what lies in the run's credentials: the role's token (ROLE.creds), else what the user gave, else the role's
    key (ROLE.seed), else nothing."""
    if folder is None:
        return NatsAccess(proof=NO_PROOF, tls=None, inbox_prefix=inbox_of(role, uid))
    given = given_server(folder, NATS)
    tls = servers_tls(folder, role) if given is None else given.tls()
    creds = folder / f"{role}.creds"
    if creds.exists():
        return NatsAccess(proof=NatsProof(creds=creds), tls=tls, inbox_prefix=inbox_of(role, uid))
    if given is not None:
        return access_to(given)
    return NatsAccess(proof=NatsProof(nkey_seed=folder / f"{role}.seed"), tls=tls, inbox_prefix=inbox_of(role, uid))


def access_to(given: GivenServer) -> NatsAccess:
    """As the user himself."""
    proof = NatsProof(user=given.user, password=given.password) if given.key_file is None else proof_of(given.key_file)
    return NatsAccess(proof=proof, tls=given.tls(), inbox_prefix=GIVEN_INBOX, keeping=ON_A_GIVEN_SERVER)


async def connect(
    connections: Connections,
    role: str,
    *,
    name: str,
    clock: Clock | None = None,
    max_pending: int = MAX_PENDING,
    publish_timeout_seconds: float = 600.0,
) -> NatsTransport:
    access = access_of(connections.credentials, role, connections.uid)
    return await NatsTransport.connect(
        connections.nats_url,
        name=name,
        role=role,
        inbox_prefix=access.inbox_prefix,
        proof=access.proof,
        tls=access.tls,
        clock=clock,
        max_pending=max_pending,
        publish_timeout_seconds=publish_timeout_seconds,
        keeping=access.keeping,
    )
