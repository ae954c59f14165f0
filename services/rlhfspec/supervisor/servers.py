from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connections import Connections, client_token_file
from rlhfspec.messages.access.rights import BUS_ROLES, rights_of
from rlhfspec.messages.servers.credentials.certificates import ServerTls, create_credentials
from rlhfspec.messages.servers.nats import NatsServer, User
from rlhfspec.messages.servers.program import ServerProgram, write_secret
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.supervisor.place import ProcessPlace


async def start_servers(job: RLHFJob, place: ProcessPlace, closing: AsyncExitStack) -> list[ServerProgram]:
    keys = create_credentials(place.credentials, BUS_ROLES)
    name = job.metadata.name
    rights = {role: asdict(rights_of(role, name, place.uid, declares=True)) for role in keys}
    users = {role: User(public_key=key, **rights[role]) for role, key in keys.items()}
    tls = ServerTls.of(place.credentials, "nats")
    password = place.credentials / "redis.password"
    servers: list[ServerProgram] = [
        NatsServer(place.path / "nats", run=place.uid, users=users, tls=tls),
        RedisServer(place.path / "redis", run=place.uid, socket_folder=place.memory, password_file=password),
    ]
    for server in servers:
        server.log = place.logs / f"{server.name}.log"
        server.log.parent.mkdir(exist_ok=True)
        closing.push_async_callback(server.stop)
        await server.start()
    return servers


def write_connections(
    job: RLHFJob,
    place: ProcessPlace,
    servers: list[ServerProgram],
    *,
    base_folder: Path,
    weights_folder: Path,
    supervisor_address: str,
    serve_port: int | None = None,
    client_token: str = "",
) -> Connections:
    if serve_port is not None:
        write_secret(client_token_file(place.credentials), client_token.encode())
    write_secret(place.job_file, job.model_dump_json(by_alias=True).encode())
    nats, redis = servers
    connections = Connections(
        uid=place.uid,
        job_file=place.job_file,
        base_folder=base_folder,
        folder=place.folder,
        nats_url=nats.url,
        redis_url=redis.url,
        credentials=place.credentials,
        weights_folder=weights_folder,
        activity_folder=place.activity,
        supervisor_address=supervisor_address,
        serve_port=serve_port,
    )
    write_secret(place.connections_file, connections.model_dump_json(indent=2).encode())
    return connections
