"""Who may do what in the Redis that jobs of a cluster share: each role its own, nobody another run's."""

from __future__ import annotations

import asyncio

import pytest
from open_runs import runs_of
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError
from shared_servers import NO_REDIS, REDIS, SharedServers
from snapshots import GENERATOR

from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.operator.redis_users import RedisUsers
from rlhfspec.operator.release import redis_login
from rlhfspec.runs.live.live import LiveState, read_live
from rlhfspec.runs.live.redis_client import client_of
from rlhfspec.runs.live.redis_users import DASHBOARD, WRITERS, ClusterRun

pytestmark = pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
UID = "3f2a"
MINE, THEIRS = ClusterRun("team-a", UID), ClusterRun("team-b", "9b9b")
EVERY_COMMAND = ("CONFIG GET *", "ACL LIST", "ACL SETUSER x", "FLUSHALL", "KEYS *", "SCAN 0", "DBSIZE", "RANDOMKEY",
                 "CLIENT LIST", "MONITOR", "INFO", "SUBSCRIBE x", "EVAL x 0", "SELECT 1")  # fmt: skip


def redis_client(servers: SharedServers, role: str, run: ClusterRun = MINE) -> Redis:
    """As a pod of this run has it."""
    if role == DASHBOARD:
        folder = servers.release_credentials(DASHBOARD)
    else:
        folder = servers.credentials(role, run=run.uid, namespace=run.namespace)
    assert servers.redis_url is not None
    return client_of(servers.redis_url, role, folder, 20.0)


@pytest.fixture
def redis_users(servers: SharedServers) -> None:
    """Of both runs, as the operator makes them."""

    async def make() -> None:
        assert servers.redis_url is not None
        login = redis_login(servers.keys, servers.folder)
        redis = RedisUsers(servers.redis_url, servers.keys.master, login, servers.keys.ca_pem)
        await redis.settle(runs_of(*((run.namespace, run.uid) for run in (MINE, THEIRS))))
        await redis.close()

    asyncio.run(make())


def commands_on(redis: Redis, key: str) -> dict[str, tuple[object, bool]]:
    """All that anybody may ask of Redis, in an order that works where there was nothing; whether it writes."""
    return {
        "sadd": (redis.sadd(key, "x"), True),
        "pexpire": (redis.pexpire(key, 60_000), True),
        "set": (redis.set(key, b"x", px=60_000), True),
        "delete": (redis.delete(key), True),
        "get": (redis.get(key), False),
        "mget": (redis.mget([key, key]), False),
        "exists": (redis.exists(key), False),
        "pttl": (redis.pttl(key), False),
        "smembers": (redis.smembers(key), False),
    }


def keys_of(run: ClusterRun) -> dict[str, str]:
    """By whose they are."""
    workers = {role: f"rlhfspec:{run.uid}:worker:{role}-0" for role in WRITERS}
    return workers | {"window": f"rlhfspec:{run.uid}:window"}


@pytest.mark.usefixtures("redis_users")
@pytest.mark.parametrize("role", [*WRITERS, DASHBOARD])
def test_a_role_writes_its_own_keys_and_nobody_touches_another_run(servers: SharedServers, role: str) -> None:
    async def main() -> None:
        async with redis_client(servers, role) as client:
            for run in (MINE, THEIRS):
                reads = role == DASHBOARD or (role == CONTROL and run == MINE)
                for owner, key in keys_of(run).items():
                    mine = run == MINE and (owner == role or (owner == "window" and role == CONTROL))
                    for command, (asked, writes) in commands_on(client, key).items():
                        wanted = mine if writes else reads
                        assert await _may(asked) == wanted, (command, key)
                index = f"rlhfspec:{run.uid}:workers"
                assert await _may(client.sadd(index, "x")) == (run == MINE and role != DASHBOARD)
                assert await _may(client.smembers(index)) == reads
            assert not await _may(client.set("anything", b"x"))
            for words in EVERY_COMMAND:
                assert not await _may(client.execute_command(*words.split())), words

    asyncio.run(main())


def test_the_operator_itself_reads_nothing(servers: SharedServers) -> None:
    async def main() -> None:
        assert servers.redis_url is not None
        user, password = redis_login(servers.keys, servers.folder)
        authority = servers.keys.ca_pem.decode()
        async with Redis.from_url(
            servers.redis_url, username=user, password=password, ssl_ca_data=authority, protocol=2
        ) as client:
            for key in keys_of(MINE).values():
                may = {command for command, (asked, _) in commands_on(client, key).items() if await _may(asked)}
                assert may == set()
            for words in ("CONFIG GET *", "FLUSHALL", "KEYS *", "ACL LIST", "SHUTDOWN"):
                assert not await _may(client.execute_command(*words.split())), words

    asyncio.run(main())


async def _may(command: object) -> bool:
    try:
        await command  # type: ignore[misc]
    except NoPermissionError:
        return False
    return True


def test_nobody_without_a_password(servers: SharedServers) -> None:
    async def main() -> None:
        folder = servers.credentials("reward")
        assert servers.redis_url is not None
        for told in ({}, {"username": "reward", "password": "wrong"}, {"username": "default", "password": ""}):
            client = Redis.from_url(servers.redis_url, ssl_ca_certs=str(folder / "servers-ca.pem"), protocol=2, **told)
            with pytest.raises(Exception, match=r"(?i)auth|invalid username"):
                await client.ping()
            await client.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("redis_users")
def test_the_live_view_works_through_it(servers: SharedServers) -> None:
    async def main() -> None:
        assert servers.redis_url is not None
        writing = LiveState(
            servers.redis_url,
            UID,
            role="generator",
            credentials=servers.credentials("generator", run=UID, namespace=MINE.namespace),
        )
        sending = asyncio.create_task(writing.run())
        writing.write(GENERATOR)
        looks = servers.credentials(CONTROL, run=UID, namespace=MINE.namespace)
        async with asyncio.timeout(60):
            while not (await read_live(servers.redis_url, UID, role=CONTROL, credentials=looks)).workers:
                await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await writing.close()
        view = await read_live(servers.redis_url, UID, role=CONTROL, credentials=looks)
        assert view.workers == {}
        assert writing.num_failures == 0

    asyncio.run(main())
