"""Runs at a release's servers, open or left over, as the operator sees them."""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shared_servers import SharedServers

from rlhfspec.messages import loop
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.messages.transport.jetstream.proof import NatsProof
from rlhfspec.messages.transport.jetstream.streams import Keeping
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.operator.deciding.observed import JobView
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.settings import OperatorFile
from rlhfspec.operator.shared.credentials import operator_creds
from rlhfspec.operator.shared.leftovers import Runs
from rlhfspec.operator.shared.redis_users import RedisUsers
from rlhfspec.operator.shared.release import servers_of
from rlhfspec.operator.shared.streams import Streams
from rlhfspec.stage.bus import Bus

JOB = "sums"


@dataclass
class Known(Cache):
    runs: set[tuple[str, str]] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def open_runs(self) -> set[tuple[str, str]]:
        return self.runs

    def jobs_of_open_runs(self) -> dict[str, JobView]:
        return {}

    def live_runs(self) -> set[str]:
        return {uid for _, uid in self.runs}


def runs_of(*open_runs: tuple[str, str], watched: Iterable[str] = ("team",), leads: bool = True) -> Runs:
    return Runs(Known(set(open_runs)), lambda: set(watched), lambda: leads)


def operators(servers: SharedServers) -> tuple[Streams, RedisUsers | None]:
    told = {
        "release": "rl", "namespace": "rlhf", "images": dict.fromkeys(("slim", "cpu", "cuda"), "x"),
        "nats_url": servers.nats_url, "redis_url": servers.redis_url, "report_url": "r",
    }  # fmt: skip
    made = servers_of(OperatorFile.model_validate(told), servers.keys, servers.release_credentials("keys"))
    nats, redis = [*made, None][:2]
    assert isinstance(nats, Streams)
    assert redis is None or isinstance(redis, RedisUsers)
    return nats, redis


async def asked_by_the_operator(servers: SharedServers, **keeping: Any) -> NatsTransport:
    file = servers.folder / "operator.creds"
    file.write_bytes(operator_creds(servers.keys))
    tls = ssl.create_default_context(cadata=servers.keys.ca_pem.decode())
    inbox, proof, kept = inbox_of("operator", "release"), NatsProof(creds=file), Keeping(**keeping)
    return await NatsTransport.connect(
        servers.nats_url, name="opening", inbox_prefix=inbox, proof=proof, tls=tls, keeping=kept
    )


async def opened(servers: SharedServers, uid: str, metadata: dict[str, str]) -> NatsTransport:
    transport = await asked_by_the_operator(servers, metadata=metadata)
    await Bus.open(transport, JOB, uid=uid, workers=dict.fromkeys(loop.BY_NAME, 1))
    return transport


async def is_there(control: NatsTransport, uid: str) -> bool:
    """Return whether all of the run's streams exist; assert that not only some do."""
    subjects = [loop.subject(JOB, uid, record) for record in loop.KINDS] + [loop.dead_letters(JOB, uid)]
    found = {await control._look(subject) is not None for subject in subjects}
    assert len(found) == 1, "some are gone and some are not"
    return found.pop()
