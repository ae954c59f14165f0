"""The operator makes streams and consumers of open runs on a real server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from coroutines import until
from open_runs import asked_by_the_operator, is_there, opened, operators
from operator_world import job_body
from shared_servers import SharedServers

from rlhfspec.errors import LeadershipLost
from rlhfspec.messages import loop
from rlhfspec.messages.transport.jetstream.streams import stream_name
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.shared import streams
from rlhfspec.operator.shared.leftovers import OpenRun, Runs, ServerAway, Tending
from rlhfspec.operator.shared.streams import metadata_of
from rlhfspec.runs.live.redis_users import install_of
from rlhfspec.stage.tasks import ended


def cache_of(*job_uids: str) -> Cache:
    cache = Cache()
    for uid in job_uids:
        body = job_body()
        body["metadata"] |= {"name": f"job-{uid}", "uid": uid}
        cache.put_job(body | {"status": {"internal": {"number": 1, "state": "open"}}})
    return cache


async def lacking(transport: NatsTransport, run: OpenRun) -> list[str]:
    found = {}
    for subject, kind, consumers in loop.declarations(run.job, run.uid, run.stages):
        there = await transport._look(subject)
        found[subject] = there is not None and (there.kind, set(there.consumers)) == (kind, {c.name for c in consumers})
        info = await transport._connection.api(f"STREAM.INFO.{stream_name(subject)}")
        found[f"consumers of {subject}"] = info.get("state", {}).get("consumer_count") == len(consumers)
    return [name for name, is_there in found.items() if not is_there]


async def test_streams_of_open_runs_are_made_again_after_nats_lost_them(tmp_path: Path) -> None:
    with SharedServers(tmp_path) as servers:
        there, _ = operators(servers)
        runs = Runs(cache_of("j1", "j2"), lambda: {"rl"}, lambda: True)
        task = asyncio.create_task(Tending(there, runs, lambda _: None).run())
        transport = await asked_by_the_operator(servers)
        both = runs.to_declare()
        assert [run.job for run in both] == ["job-j1", "job-j2"]
        assert "critic" not in both[0].stages

        async def are_made() -> bool:
            return not any([await lacking(transport, run) for run in both])

        await until(are_made, "all streams are made")
        info = await transport._connection.api(f"STREAM.INFO.rlhf_job-j1_{both[0].uid}_sample")
        assert metadata_of(install_of(servers.keys.master), "rl").items() <= info["config"]["metadata"].items()
        await asyncio.to_thread(servers.kill_nats)
        shutil.rmtree(servers.folder / "store")
        await asyncio.to_thread(servers.start_nats)
        await until(are_made, "all streams are made again")
        await ended(task)
        await transport.close()


async def test_a_run_that_nats_refuses_is_named_and_blocks_no_other(servers: SharedServers) -> None:
    there, _ = operators(servers)
    runs = Runs(cache_of("k1", "k2"), lambda: {"team", "rl"}, lambda: True)
    refused, other = runs.to_declare()
    transport = await opened(servers, "99ee", metadata_of(install_of(servers.keys.master), "team"))
    overlap = {"name": "OTHERS", "subjects": [loop.subject(refused.job, refused.uid, loop.Prompt)]}
    assert "error" not in await transport._connection.api("STREAM.CREATE.OTHERS", overlap)
    with pytest.raises(ServerAway, match=rf"STREAM.CREATE.rlhf_job-k1_{refused.uid}_prompt: subjects overlap"):
        await there.settle(runs)
    assert not await lacking(transport, other)
    assert not await is_there(transport, "99ee"), "what is over went all the same"
    assert "error" not in await transport._connection.api("STREAM.DELETE.OTHERS")
    await there.settle(runs)
    assert not await lacking(transport, refused)
    await transport.close()


async def test_an_operator_that_lost_leadership_makes_no_streams(servers: SharedServers) -> None:
    there, _ = operators(servers)
    runs = Runs(cache_of("l1"), set, lambda: False)
    with pytest.raises(LeadershipLost):
        await there.settle(runs)
    transport = await asked_by_the_operator(servers)
    [run] = runs.to_declare()
    assert await transport._look(loop.subject(run.job, run.uid, loop.Prompt)) is None
    await transport.close()


async def test_streams_that_a_predecessor_left_unfinished_are_completed(servers: SharedServers) -> None:
    """A predecessor may have died between a stream and its consumers."""
    there, _ = operators(servers)
    runs = Runs(cache_of("m1"), set, lambda: True)
    [run] = runs.to_declare()
    transport = await asked_by_the_operator(servers)
    _, (call, body), *_ = [each for each in streams.calls_of(run, "", ()) if each[0].startswith("STREAM.")]
    assert "error" not in await transport._connection.api(call, body)
    await there.settle(runs)
    assert not await lacking(transport, run)
    assert streams.calls_of(run, "", await there_now(transport, run)) == []
    await transport.close()


async def there_now(transport: NatsTransport, run: OpenRun) -> set[str]:
    declared = loop.declarations(run.job, run.uid, run.stages)
    return {stream_name(each.subject) for each in declared if await transport._look(each.subject) is not None}
