"""Connection to NATS with a role's credentials."""

from __future__ import annotations

import logging
import random
import ssl
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.errors import TransportUnavailable
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.messages.servers.credentials.certificates import LIFETIME, servers_tls
from rlhfspec.messages.transport.clock import Clock, SystemClock
from rlhfspec.messages.transport.jetstream.proof import NO_PROOF, NatsProof
from rlhfspec.messages.transport.nats import NatsTransport

MAX_PENDING = 8192  # messages; equals the default of NatsTransport
KEEP_SECONDS = LIFETIME.total_seconds()  # longer than any message waits while a run continues
_MIN_CONNECT_SECONDS = 5.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 30.0
log = logging.getLogger("rlhfspec.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """Credentials, TLS context and reply inbox of one role's connection to NATS."""

    proof: NatsProof
    tls: ssl.SSLContext | None
    inbox_prefix: str


def access_of(folder: Path | None, role: str, uid: str) -> NatsAccess:
    """Return a role's access by the folder's token ROLE.creds if it exists, else by its key ROLE.seed."""
    if folder is None:
        return NatsAccess(proof=NO_PROOF, tls=None, inbox_prefix=inbox_of(role, uid))
    creds = folder / f"{role}.creds"
    proof = NatsProof(creds=creds) if creds.exists() else NatsProof(nkey_seed=folder / f"{role}.seed")
    return NatsAccess(proof=proof, tls=servers_tls(folder, role), inbox_prefix=inbox_of(role, uid))


async def connect(
    connections: Connections,
    role: str,
    *,
    name: str,
    clock: Clock | None = None,
    max_pending: int = MAX_PENDING,
    publish_timeout_seconds: float = 600.0,
    patience_seconds: float = 0.0,
) -> NatsTransport:
    """Connect a role as client `name`, retrying an absent server with backoff for `patience_seconds`."""
    clock = clock or SystemClock()
    access = access_of(connections.credentials, role, connections.uid)
    end, wait, log_level = clock.now() + patience_seconds, _FIRST_WAIT_SECONDS, logging.WARNING
    while True:
        try:
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
                connect_timeout_seconds=max(wait, _MIN_CONNECT_SECONDS),
            )
        except TransportUnavailable as error:
            if clock.now() + wait > end:
                raise
            log.log(log_level, "%s; retrying until it is reachable", error)
        await clock.sleep(wait * random.uniform(0.5, 1.0))
        wait, log_level = min(2 * wait, _LONGEST_WAIT_SECONDS), logging.DEBUG
