"""Rights in the shared Redis: control writes its run's state, workers write nothing."""

import asyncio

import pytest
from open_runs import runs_of
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError
from shared_servers import NO_REDIS, REDIS, SharedServers
from snapshots import GENERATOR

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.loop import STAGES
from rlhfspec.operator.shared.redis_users import RedisUsers
from rlhfspec.operator.shared.release import redis_login
from rlhfspec.runs.live.live import LiveState, LiveView, read_live
from rlhfspec.runs.live.redis_client import client, client_of
from rlhfspec.runs.live.redis_users import (
    DASHBOARD,
    PASSWORD_FILE,
    USER_FILE,
    ClusterRun,
    live_key,
    password_of,
    user_of,
)
from rlhfspec.runs.live.run_state import RunState, after

pytestmark = pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
UID = "3f2a"
MINE, THEIRS = ClusterRun("team-a", UID), ClusterRun("team-b", "9b9b")
EVERY_COMMAND = ("CONFIG GET *", "ACL LIST", "ACL SETUSER x", "FLUSHALL", "KEYS *", "SCAN 0", "DBSIZE", "RANDOMKEY",
                 "CLIENT LIST", "MONITOR", "INFO", "SUBSCRIBE x", "EVAL x 0", "SELECT 1")  # fmt: skip


def redis_client(servers: SharedServers, role: str, run: ClusterRun = MINE) -> Redis:
    if role == DASHBOARD:
        folder = servers.release_credentials(DASHBOARD)
    else:
        folder = servers.credentials(role, run=run.uid, namespace=run.namespace)
    return client_of(servers.redis_url, folder, 20.0)


@pytest.fixture
def redis_users(servers: SharedServers) -> None:
    async def make() -> None:
        login = redis_login(servers.keys, servers.folder)
        redis = RedisUsers(servers.redis_url, servers.keys.master, login, servers.keys.ca_pem)
        await redis.settle(runs_of(*((run.namespace, run.uid) for run in (MINE, THEIRS))))
        await redis.close()

    asyncio.run(make())


def commands_on(redis: Redis, key: str) -> dict[str, tuple[object, bool]]:
    """Return all possible Redis commands, and whether each writes."""
    return {
        "set": (redis.set(key, b"x", px=60_000), True),
        "delete": (redis.delete(key), True),
        "get": (redis.get(key), False),
        "pttl": (redis.pttl(key), False),
    }


@pytest.mark.usefixtures("redis_users")
@pytest.mark.parametrize("role", [CONTROL, DASHBOARD])
async def test_only_control_writes_and_only_to_its_own_run(servers: SharedServers, role: str) -> None:
    async with redis_client(servers, role) as client:
        for run in (MINE, THEIRS):
            wanted = {True: role == CONTROL and run == MINE, False: role == DASHBOARD or run == MINE}
            for command, (asked, writes) in commands_on(client, live_key(run.uid)).items():
                assert await _may(asked) == wanted[writes], (command, run)
        for key in ("anything", f"rlhfspec:{UID}:worker:reward-0", f"rlhfspec:{UID}:live:more"):
            assert not await _may(client.set(key, b"x")), key
        for words in EVERY_COMMAND:
            assert not await _may(client.execute_command(*words.split())), words


@pytest.mark.usefixtures("redis_users")
@pytest.mark.parametrize("role", [stage.name for stage in STAGES])
async def test_a_worker_has_no_user_and_no_password_and_may_write_nothing(servers: SharedServers, role: str) -> None:
    folder = servers.credentials(role, run=UID, namespace=MINE.namespace)
    assert not {USER_FILE, PASSWORD_FILE} & {path.name for path in folder.iterdir()}
    with pytest.raises(InvalidRequest, match="credentials: cannot be read"):
        redis_client(servers, role)
    # With all that its pod could guess: the names of users are no secrets.
    control = user_of(servers.keys.master, MINE)
    authority = str(folder / "servers-ca.pem")
    for user in (control, control.replace(CONTROL, role), role):
        options = {"username": user, "password": password_of(bytes(32), UID, role), "ssl_ca_certs": authority}
        async with client(servers.redis_url, 20.0, options) as redis:
            with pytest.raises(AuthenticationError):
                await redis.set(live_key(UID), b"x")


async def test_the_operator_may_not_read_live_views(servers: SharedServers) -> None:
    user, password = redis_login(servers.keys, servers.folder)
    authority = servers.keys.ca_pem.decode()
    async with Redis.from_url(
        servers.redis_url, username=user, password=password, ssl_ca_data=authority, protocol=2
    ) as client:
        asked_of = commands_on(client, live_key(UID))
        assert {command for command, (asked, _) in asked_of.items() if await _may(asked)} == set()
        for words in ("CONFIG GET *", "FLUSHALL", "KEYS *", "ACL LIST", "SHUTDOWN"):
            assert not await _may(client.execute_command(*words.split())), words


async def _may(command: object) -> bool:
    try:
        await command  # type: ignore[misc]
    except NoPermissionError:
        return False
    return True


async def test_redis_refuses_clients_without_the_right_password(servers: SharedServers) -> None:
    folder = servers.credentials("reward")
    for told in ({}, {"username": "reward", "password": "wrong"}, {"username": "default", "password": ""}):
        async with client(servers.redis_url, 20.0, {"ssl_ca_certs": str(folder / "servers-ca.pem"), **told}) as redis:
            with pytest.raises(Exception, match=r"(?i)auth|invalid username"):
                await redis.ping()


@pytest.mark.usefixtures("redis_users")
async def test_the_live_view_works_with_the_rights_of_its_users(servers: SharedServers) -> None:
    looks = servers.credentials(CONTROL, run=UID, namespace=MINE.namespace)
    writing = LiveState(servers.redis_url, UID, credentials=looks)
    sending = asyncio.create_task(writing.run())
    writing.write(LiveView(run=after(RunState(), [(0.0, each) for each in GENERATOR])))
    async with asyncio.timeout(60):
        while not (await read_live(servers.redis_url, UID, credentials=looks)).run.workers:
            await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await writing.close()
    assert not (await read_live(servers.redis_url, UID, credentials=looks)).run.workers
    assert writing.num_failures == 0
