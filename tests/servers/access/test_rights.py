"""Each role's rights on a real server: its own work is allowed, all else denied."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import stage_rights
from nats_servers import NatsServer
from stage_rights import DEAD, JOB, STAGES, UID, WORK, denied, denied_to, looked_at_by, subject

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages import loop
from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL, inbox_of, rights_of
from rlhfspec.messages.records import Prompt, Sample
from rlhfspec.messages.servers.credentials.derived import new_nkey
from rlhfspec.messages.servers.nats import User, nats_config
from rlhfspec.messages.transport.base import Message, Subscription
from rlhfspec.messages.transport.dead_letters import decode
from rlhfspec.messages.transport.jetstream.proof import NatsProof
from rlhfspec.messages.transport.jetstream.streams import stream_name
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.stage.bus import Bus

WORKERS = dict.fromkeys(loop.BY_NAME, 1)


@dataclass(frozen=True)
class Place:
    url: str
    folder: Path

    def seed(self, role: str) -> Path:
        return self.folder / f"{role}.seed"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("rights")
    users = {}
    for role in BUS_ROLES:
        seed, public_key = new_nkey()
        (folder / f"{role}.seed").write_text(seed)
        users[role] = User(public_key=public_key, **asdict(rights_of(role, JOB, UID, declares=True)))
    with NatsServer(folder / "nats", nats_config(users, None)) as server:
        yield Place(server.url, folder)


@asynccontextmanager
async def everybody(place: Place) -> AsyncIterator[dict[str, NatsTransport]]:
    transports = {}
    for role in BUS_ROLES:
        own = {"inbox_prefix": inbox_of(role, UID), "proof": NatsProof(nkey_seed=place.seed(role))}
        connecting = NatsTransport.connect(place.url, name=role, role=role, publish_timeout_seconds=20.0, **own)
        transports[role] = await connecting
    try:
        await Bus.open(transports[CONTROL], JOB, uid=UID, workers=WORKERS)
        yield transports
    finally:
        await asyncio.gather(*(transport.close() for transport in transports.values()))


async def read(reading: Subscription, ids: set[str]) -> dict[str, Message]:
    found: dict[str, Message] = {}
    while not ids <= found.keys():
        messages = await reading.pull(100, 20.0)
        assert messages, f"{ids - found.keys()} did not come"
        found |= {message.id: message for message in messages}
    return found


async def test_every_role_has_the_rights_that_its_work_needs(place: Place) -> None:
    async with everybody(place) as transports:
        pulled, watched = {}, {}
        for name, stage in STAGES.items():
            for record in set(stage.consumes) & set(WORK):
                pulled[name, record] = await transports[name].subscribe(subject(record), loop.work_consumer(stage))
        for role in BUS_ROLES:
            for record in looked_at_by(role):
                watched[role, record] = await transports[role].watch(subject(record))
        published: dict[type, set[str]] = {}
        for name, stage in STAGES.items():
            for record in (*stage.produces, *loop.OF_A_PROCESS):
                id = f"{name}/{record.__name__}"
                assert await transports[name].publish(subject(record), b"!", id=id, key=f"{name}-0")
                published.setdefault(record, set()).add(id)
        for (_, record), reading in watched.items():
            await read(reading, published[record])
        letters = set()
        for (name, record), reading in pulled.items():
            for id, message in (await read(reading, published[record])).items():
                await message.in_progress()
                adopted = await transports[name].adopt(message.token, subject(record), name)
                await adopted.term("for the test")
                letters.add((name, id))
        heard = await read(
            await transports[CONTROL].watch(DEAD),
            {f"{id.rpartition('/')[2].lower()}/{name}/{id}" for name, id in letters},
        )
        assert {decode(message.data).data for message in heard.values()} == {b"!"}
        for (name, record), reading in pulled.items():
            await transports[CONTROL].release(subject(record), name)
            await transports[name].release(subject(record), name)
            assert await reading.pull(1, 0.0) == [], "term is for ever"


async def test_a_refusal_names_the_subject_and_comes_at_once(place: Place) -> None:
    async with everybody(place) as transports:
        reward = transports["reward"]
        with pytest.raises(InvalidRequest, match=rf"STREAM\.INFO\.{stream_name(subject(Prompt))}"):
            await reward.publish(subject(Prompt), b"", id="forged")
        denied = "permission denied: role reward may not"
        with pytest.raises(InvalidRequest, match=f"{denied} publish to {subject(Sample)}"):
            await reward.publish(subject(Sample), b"", id="forged")
        stolen = await reward.subscribe(subject(Sample), loop.work_consumer(STAGES["trainer"]))
        with pytest.raises(InvalidRequest, match=r"CONSUMER\.MSG\.NEXT\..*sample\.trainer"):
            await stolen.pull(1, 20.0)
        with pytest.raises(InvalidRequest, match=r"STREAM\.INFO\..*int"):
            await transports["view"].declare(loop.subject(JOB, UID, int), "signal")
        with pytest.raises(InvalidRequest, match=f"{denied} subscribe to {subject(Sample)}"):
            await reward.watch(subject(Sample))


@pytest.mark.parametrize("role", BUS_ROLES)
async def test_a_role_is_denied_everything_else(place: Place, role: str) -> None:
    refused = await denied(
        place.url, stage_rights.may_publish(), stage_rights.may_subscribe(), nkeys_seed=str(place.seed(role))
    )
    wanted = denied_to(role)
    assert (refused - wanted, wanted - refused) == (set(), set()), "denied too much, or too little"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must be one of prompts"):
        rights_of("rewrd", JOB, UID)
