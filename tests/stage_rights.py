"""Subjects that each role may publish and subscribe to, derived from the loop."""

import re
from collections.abc import Iterable
from typing import Any

import nats

from rlhfspec.messages import loop
from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL, inbox_of
from rlhfspec.messages.transport.jetstream.streams import stream_name

JOB, UID = "sums", "3f2a"
DEAD = loop.dead_letters(JOB, UID)
STAGES = {stage.name: stage for stage in loop.SUPERVISED}
WORK = [record for record, kind in loop.KINDS.items() if kind == "work"]


def subject(record: type) -> str:
    return loop.subject(JOB, UID, record)


def looked_at_by(role: str) -> set[type]:
    if role == CONTROL:
        return set(loop.KINDS)
    stage = loop.BY_NAME[role]
    if stage in loop.OBSERVERS:
        return set(stage.consumes)
    return {record for record in stage.consumes if record not in WORK} | {*stage.watches, *loop.SEEN_BY_ALL}


def may_publish(*, in_a_cluster: bool = False) -> dict[str, set[str]]:
    everybody = {*STAGES}
    opening = set() if in_a_cluster else {CONTROL}
    may: dict[str, set[str]] = {}
    for record, kind in loop.KINDS.items():
        stream = stream_name(subject(record))
        producers = everybody if record in loop.OF_A_PROCESS else {n for n, s in STAGES.items() if record in s.produces}
        lookers = {role for role in BUS_ROLES if record in looked_at_by(role)}
        pullers = {n for n, s in STAGES.items() if record in s.consumes} if kind == "work" else set()
        may[f"{subject(record)}.x" if kind == "state" else subject(record)] = producers
        may[f"{subject(record)}.x.y"] = set()
        may[f"latest.{subject(record)}.x"] = set()
        may[f"signal.{subject(record)}"] = set()
        may[f"$JS.API.STREAM.INFO.{stream}"] = producers | lookers | pullers | {CONTROL}
        may[f"$JS.API.STREAM.CREATE.{stream}"] = opening
        may[f"$JS.API.STREAM.MSG.GET.{stream}"] = pullers | (lookers if kind == "state" else set())
        may[f"$JS.API.CONSUMER.LIST.{stream}"] = producers if kind == "work" else set()
        for verb in ("STREAM.DELETE", "STREAM.PURGE", "STREAM.UPDATE", "STREAM.MSG.DELETE", "STREAM.SNAPSHOT"):
            may[f"$JS.API.{verb}.{stream}"] = set()
        for name in BUS_ROLES:
            pulls = {name} & pullers
            may[f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"] = pulls
            may[f"$JS.ACK.{stream}.{name}.1.1.1.1.0"] = pulls | (opening if pulls else set())
            may[f"$JS.API.CONSUMER.INFO.{stream}.{name}"] = pulls | (opening if pulls else set())
            may[f"$JS.API.CONSUMER.CREATE.{stream}.{name}"] = opening if pulls else set()
            may[f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{name}"] = set()
            may[f"$JS.API.CONSUMER.DELETE.{stream}.{name}"] = set()
        may[f"$JS.API.CONSUMER.CREATE.{stream}"] = set()
    may[f"{DEAD}.x"] = {name for name, stage in STAGES.items() if set(stage.consumes) & set(WORK)}
    may[f"$JS.API.STREAM.MSG.GET.{stream_name(DEAD)}"] = {CONTROL}
    may[f"$JS.API.STREAM.DELETE.{stream_name(DEAD)}"] = set()
    may[f"$JS.API.STREAM.CREATE.{stream_name(DEAD)}"] = opening
    for other in ("$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES", "$JS.API.INFO", "$SYS.REQ.SERVER.PING", "anything"):
        may[other] = set()
    for name in BUS_ROLES:
        may[f"{inbox_of(name, UID)}.1.2"] = set()
    return may


def may_subscribe() -> dict[str, set[str]]:
    may: dict[str, set[str]] = {}
    for record, kind in loop.KINDS.items():
        lookers = {role for role in BUS_ROLES if record in looked_at_by(role)}
        may[f"latest.{subject(record)}.*"] = lookers if kind == "state" else set()
        may[subject(record)] = set() if kind == "state" else lookers
        may[f"{subject(record)}.*"] = set()
    may[f"latest.{DEAD}.*"] = {CONTROL}
    for name in BUS_ROLES:
        may[f"{inbox_of(name, UID)}.>"] = {name}
    for other in (">", "rlhf.>", "latest.>", "*.>", "_INBOX.>", "$JS.>", "$JS.ACK.>", "$SYS.>", f"rlhf.{JOB}.{UID}.*"):
        may[other] = set()
    return may


def denied_to(role: str, *, in_a_cluster: bool = False) -> set[str]:
    may = {f"publish {to}": roles for to, roles in may_publish(in_a_cluster=in_a_cluster).items()}
    may |= {f"subscription {of}": roles for of, roles in may_subscribe().items()}
    return {attempt.lower() for attempt, roles in may.items() if role not in roles}


async def denied(url: str, publish: Iterable[str], subscribe: Iterable[str], **credentials: Any) -> set[str]:
    """Return what the server refuses of these attempts, in lower case."""
    refused: set[str] = set()

    async def note(error: Exception) -> None:
        found = re.search(r'permissions violation for (publish|subscription) to "([^"]+)"', str(error))
        assert found is not None, error
        refused.add(f"{found[1]} {found[2]}")

    client = await nats.connect(url, error_cb=note, allow_reconnect=False, **credentials)
    for to in publish:
        await client.publish(to, b"{}")
        await client.flush()
    for of in subscribe:
        await client.subscribe(of)
        await client.flush()
    await client.flush()  # its ping overtook what was still to be sent
    await client.close()
    return refused
