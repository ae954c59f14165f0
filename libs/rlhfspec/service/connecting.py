"""A process's connection to NATS as a role of the run, with whatever credentials the run has for it.

transport = await connect(connections, "reward", name="reward-0", clock=clock)
"""

from __future__ import annotations

from rlhfspec.servers.certificates import servers_tls
from rlhfspec.service.connections import Connections
from rlhfspec.service.rights import inbox_of
from rlhfspec.transport.clock import Clock
from rlhfspec.transport.nats import NatsTransport

MAX_PENDING = 8192  # messages; as of NatsTransport


async def connect(
    connections: Connections,
    role: str,
    *,
    name: str,
    clock: Clock | None = None,
    max_pending: int = MAX_PENDING,
    publish_timeout_seconds: float = 600.0,
) -> NatsTransport:
    """A token where there is one (ROLE.creds), else an NKEY (ROLE.seed), else nothing."""
    folder = connections.credentials
    creds = folder / f"{role}.creds" if folder else None
    has_creds = creds is not None and creds.exists()
    return await NatsTransport.connect(
        connections.nats_url,
        name=name,
        inbox_prefix=inbox_of(role, connections.uid),
        creds=creds if has_creds else None,
        nkey_seed=folder / f"{role}.seed" if folder and not has_creds else None,
        tls=servers_tls(folder, role) if folder else None,
        clock=clock,
        max_pending=max_pending,
        publish_timeout_seconds=publish_timeout_seconds,
    )
