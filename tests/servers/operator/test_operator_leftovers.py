"""Leftovers of runs in real NATS and Redis are removed, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from coroutines import until
from open_runs import JOB, asked_by_the_operator, is_there, opened, operators, runs_of
from operator_objects import job, pod
from places import ROOT
from shared_servers import NO_REDIS, REDIS, SharedServers, free_port

from rlhfspec.errors import LeadershipLost
from rlhfspec.messages import loop
from rlhfspec.messages.access.rights import CONTROL, inbox_of
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.shared import streams
from rlhfspec.operator.shared.credentials import new_keys
from rlhfspec.operator.shared.leftovers import Runs, ServerAway, Tending
from rlhfspec.operator.shared.redis_users import RedisUsers
from rlhfspec.operator.shared.release import redis_login
from rlhfspec.operator.shared.streams import Streams, metadata_of
from rlhfspec.runs.live import redis_users as users
from rlhfspec.runs.live.redis_client import client_of
from rlhfspec.runs.live.redis_users import ClusterRun, install_of
from rlhfspec.stage.tasks import ended

needs_redis = pytest.mark.skipif(REDIS is None, reason=NO_REDIS)


# ---- streams --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def five_runs(servers: SharedServers) -> AsyncIterator[dict[str, NatsTransport]]:
    ours = install_of(servers.keys.master)
    marks = {
        "11aa": metadata_of(ours, "team"),
        "22bb": metadata_of(ours, "gone"),
        "33cc": metadata_of(ours, "never-heard-of"),
        "44dd": metadata_of(install_of(new_keys().master), "team"),
        "55ee": {},
    }
    controls = {uid: await opened(servers, uid, metadata) for uid, metadata in marks.items()}
    try:
        yield controls
    finally:
        await asyncio.gather(*(control.close() for control in controls.values()))


async def test_streams_go_with_their_run_and_no_others_do(servers: SharedServers) -> None:
    """Streams of open runs, other installs, laptops and invisible namespaces stay."""
    there, _ = operators(servers)
    async with five_runs(servers) as controls:

        async def left(runs: Runs) -> set[str]:
            await there.settle(runs)
            return {uid for uid, control in controls.items() if await is_there(control, uid)}

        everything = set(controls)
        assert await left(runs_of(("team", "11aa"), ("gone", "22bb"))) == everything, "all that is ours is open"
        with pytest.raises(LeadershipLost):
            await there.settle(runs_of(leads=False))
        assert await left(runs_of(watched=())) == everything, "nobody knows"
        assert await left(runs_of()) == everything - {"11aa"}
        known = runs_of(("gone", "22bb"))
        assert await left(known) == everything - {"11aa"}
        known._cache.runs.clear()  # type: ignore[attr-defined]
        known._cache.left.add("gone")
        assert await left(known) == everything - {"11aa"}, "its namespace has lost its label, and it may go on"
        known._cache.left.clear()
        assert await left(known) == everything - {"11aa", "22bb"}, "it was seen to end"
        assert await left(runs_of(watched=["never-heard-of"])) == {"44dd", "55ee"}, "it is heard of now"


async def test_only_streams_of_work_have_a_maximum_age(servers: SharedServers) -> None:
    """The last record of a subject stays, as a data set is announced once in a run."""
    await servers.make_streams("66ff")
    control = await asked_by_the_operator(servers)
    for record, kind in loop.KINDS.items():
        info = await control._connection.api(f"STREAM.INFO.rlhf_{JOB}_66ff_{record.__name__.lower()}")
        assert info["config"]["max_age"] / 86400e9 == (30.0 if kind == "work" else 0.0), record
    await control.close()


@contextmanager
def deaf_server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def streams_at(port: int) -> Streams:
    return Streams(f"nats://127.0.0.1:{port}", "6eb63d927a08", None, "", None)


async def test_a_silent_or_missing_nats_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "CALL_SECONDS", 0.5)
    with caplog.at_level(logging.INFO), deaf_server() as port:
        for at in (port, free_port()):
            failed: list[str] = []
            caplog.clear()
            tending = Tending(streams_at(at), runs_of(), failed.append)
            for _ in range(2):
                await asyncio.wait_for(tending._look(), 20.0)
            assert failed == ["NATS", "NATS"]
            [record] = [each for each in caplog.records if each.name == "rlhfspec.operator.shared.leftovers"]
            assert "open runs continue" in record.message


@needs_redis
async def test_a_deaf_nats_delays_nothing_in_redis(servers: SharedServers) -> None:
    _, redis = operators(servers)
    with deaf_server() as port:
        runs = runs_of(("team", "a11a"))
        asked = asyncio.Event()
        nats = Tending(streams_at(port), runs, lambda _: asked.set())
        tasks = [asyncio.create_task(each.run()) for each in (nats, Tending(redis, runs, lambda _: None))]
        await until_may(servers, "a11a")
        assert not asked.is_set(), "NATS did not even give up"
        await ended(*tasks)


# ---- Redis ----------------------------------------------------------------------------------------------------------


async def may(servers: SharedServers, uid: str, namespace: str = "team") -> str:
    """Return "" if the run's control has access with its pod's Secret, else the error."""
    from redis.exceptions import RedisError

    async with client_of(servers.redis_url, servers.credentials(CONTROL, run=uid, namespace=namespace), 20.0) as redis:
        try:
            await redis.set(users.live_key(uid), b"x")
        except (RedisError, OSError) as error:
            return str(error)
    return ""


async def until_may(servers: SharedServers, uid: str) -> None:
    async def is_let_in() -> bool:
        return await may(servers, uid) == ""

    await until(is_let_in, "control has access")


async def users_and_keys(servers: SharedServers) -> tuple[set[str], set[str]]:
    _, redis = operators(servers)
    there = [run for name in await redis._redis.acl_users() if (run := users.run_of(servers.keys.master, str(name)))]
    keys = [key.decode().split(":")[1] async for key in redis._redis.scan_iter(match="rlhfspec:*")]
    await redis.close()
    return {run.uid for run in there}, set(keys)


@needs_redis
async def test_users_and_keys_go_with_their_run_and_no_others_do(servers: SharedServers) -> None:
    _, redis = operators(servers)
    stranger = users.user_of(new_keys().master, ClusterRun("team", "5e5e"))
    both = runs_of(("team", "b22b"), ("gone", "c33c"))
    await redis.settle(both)
    assert not await may(servers, "b22b")
    assert not await may(servers, "c33c", "gone")
    assert await may(servers, "5e5e"), "nobody made that user"
    assert await users_and_keys(servers) == ({"b22b", "c33c"}, {"b22b", "c33c"})
    with pytest.raises(LeadershipLost):
        await redis.settle(runs_of(leads=False))
    await redis.settle(runs_of(watched=()))
    assert (await users_and_keys(servers))[0] == {"b22b", "c33c"}, "nobody knows"
    await redis.settle(runs_of())
    assert await users_and_keys(servers) == ({"c33c"}, {"c33c"})
    assert await may(servers, "b22b")
    assert not await may(servers, "c33c", "gone")
    await redis._redis.execute_command("ACL SETUSER", stranger, "on")
    await redis._redis.execute_command("ACL SETUSER", "somebody", "on")
    both._cache.runs.clear()  # type: ignore[attr-defined]
    await redis.settle(both)
    assert await users_and_keys(servers) == (set(), set())
    assert {stranger, "somebody", "operator", "default"} <= set(await redis._redis.acl_users())
    await redis._redis.execute_command("ACL DELUSER", stranger, "somebody")
    await redis.close()


@needs_redis
async def test_a_redis_that_was_started_anew_has_its_users_again(servers: SharedServers) -> None:
    _, redis = operators(servers)
    failed: list[str] = []
    task = asyncio.create_task(Tending(redis, runs_of(("team", "d44d")), failed.append).run())
    await until_may(servers, "d44d")
    await asyncio.to_thread(servers.kill_redis)
    await asyncio.to_thread(servers.start_redis)
    await until_may(servers, "d44d")
    await ended(task)


@needs_redis
def test_cancelling_the_cleanup_at_any_moment_leaves_no_connection(servers: SharedServers) -> None:
    async def cancelled(seconds: float) -> None:
        _, redis = operators(servers)
        task = asyncio.create_task(Tending(redis, runs_of(("team", "f77f")), lambda _: None).run())
        await asyncio.sleep(seconds)
        await ended(task)

    gc.freeze()  # what other tests left is not looked at each time
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for moment in range(150):
                asyncio.run(cancelled(0.001 + 0.0002 * moment))
                gc.collect()
    finally:
        gc.unfreeze()
    assert [str(each.message) for each in caught] == []


@needs_redis
async def test_a_redis_user_without_the_right_to_make_users_is_named(servers: SharedServers, tmp_path: Path) -> None:
    (tmp_path / "redis.username").write_text("somebody\n")
    (tmp_path / "redis.password").write_text("s3cret\n")
    login = redis_login(servers.keys, tmp_path)
    assert login == ("somebody", "s3cret")
    assert redis_login(servers.keys, tmp_path / "none")[0] == "operator"
    redis = RedisUsers(servers.redis_url, servers.keys.master, login, servers.keys.ca_pem)
    with pytest.raises(ServerAway, match="username-password"):
        await redis.settle(runs_of())
    await redis.close()


@needs_redis
async def test_a_redis_of_ones_own_needs_the_user_that_the_chart_documents(servers: SharedServers) -> None:
    documented = re.findall(
        r"`ACL SETUSER rlhfspec-operator on >PASSWORD (.+?)`", (ROOT / "docs" / "chart.md").read_text()
    )
    _, first = operators(servers)
    await first._redis.execute_command("ACL SETUSER", "rlhfspec-operator", "on", ">s3cret", *documented[0].split())
    theirs = RedisUsers(servers.redis_url, servers.keys.master, ("rlhfspec-operator", "s3cret"), servers.keys.ca_pem)
    await theirs.settle(runs_of(("team", "e55f")))
    assert not await may(servers, "e55f")
    await theirs.settle(runs_of())
    assert await users_and_keys(servers) == (set(), set())
    await first._redis.execute_command("ACL DELUSER", "rlhfspec-operator")
    await asyncio.gather(first.close(), theirs.close())


# ---- which runs there are -------------------------------------------------------------------------------------------


def of_run(number: int, state: str, version: int) -> dict[str, object]:
    return {**job(version=version), "status": {"internal": {"number": number, "state": state}}}


def test_the_cache_lists_open_runs_and_calls_back_on_changes() -> None:
    told: list[None] = []
    cache = Cache(runs_changed=lambda: told.append(None))
    cache.put_job(job(version=1))
    assert cache.open_runs() == set()
    told.clear()
    cache.put_job(of_run(1, "open", 2))
    [(namespace, uid)] = cache.open_runs()
    assert (namespace, len(uid), cache.live_runs(), len(told)) == ("team", 16, {uid}, 1)
    cache.put_job(of_run(1, "closing", 3))
    assert (cache.live_runs(), len(told)) == ({uid}, 1), "nothing new"
    cache.put_job(of_run(1, "closed", 4))
    assert (cache.live_runs(), len(told)) == (set(), 2)
    cache.put_job(of_run(2, "open", 5))
    assert (cache.open_runs() & {("team", uid)}, len(told)) == (set(), 3)
    cache.remove_job(job(version=6))
    assert (cache.open_runs(), len(told)) == (set(), 4)


def test_a_run_is_live_as_long_as_its_pods() -> None:
    """Pods outlive a deleted job: its trainer may still write a checkpoint."""
    cache = Cache()
    body = pod(phase="Running")
    body["metadata"]["labels"]["rlhfspec.io/run"] = "e55e"
    cache.put_pod(body)
    assert (cache.open_runs(), cache.live_runs()) == (set(), {"e55e"})
    body["metadata"]["resourceVersion"], body["status"] = "2", {"phase": "Succeeded"}
    cache.put_pod(body)
    assert cache.live_runs() == set()


def test_the_operator_has_an_inbox_of_its_own(servers: SharedServers) -> None:
    there, _ = operators(servers)
    assert there._options["inbox_prefix"] == inbox_of("operator", "release").encode()
