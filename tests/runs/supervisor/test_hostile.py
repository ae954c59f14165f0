import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import train
from started import Started, hold_rewards
from wire_records import SAMPLE, SCORE

from rlhfspec.errors import InvalidRequest, MessageTooLarge, RLHFSpecError
from rlhfspec.messages import loop, records
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.servers.credentials.certificates import client_tls
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.jetstream.proof import NatsProof
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.messages.wire.codec import encode

JOB = "letters"
EXAMPLES: dict[type[records.Record], records.Record] = {
    records.Prompt: records.Prompt(
        id="letters/1/0/0", job=JOB, step=1, prompt=0, replica=0, text="!", token_ids=(1,), columns_json="{}", seed=1,
        weights_version=0,
    ),
    records.Sample: replace(SAMPLE, id="letters/1/0/0", job=JOB, step=1),
    records.Score: replace(SCORE, id="letters/1/0/0/reward", sample_id="letters/1/0/0", job=JOB, step=1),
    records.Demand: records.Demand(id="letters/1/demand/1", job=JOB, step=1, round=1, num_prompts=9),
    records.Weights: records.Weights(id="x", job=JOB, version=9, role="policy", uri="file:/etc/passwd", digest="00"),
    records.DatasetInfo: records.DatasetInfo(id="x", job=JOB, num_prompts=1, num_held_out=0, last_step=0),
    records.StepReport: records.StepReport(id="x", job=JOB, metrics=example_step(step=9)),
}  # fmt: skip
PRODUCERS = {record: next(s.name for s in loop.STAGES if record in s.produces) for record in EXAMPLES}


def hostile(record_type: type[records.Record]) -> list[bytes]:
    """Return messages that do not fit their subject, under unused ids."""
    example = EXAMPLES[record_type]
    valid = encode(example)
    other = next(each for kind, each in EXAMPLES.items() if kind is not record_type)
    return [
        b"\xff" * 64,
        b"[" * 100_000,
        valid[:-1] + b"\xff\xff\xff\xff\x7f",
        encode(other),
        encode(replace(example, job="another")),
        encode(replace(example, id="\N{PILE OF POO}" * 300)),
        valid + b"\x00" * 5_000_000,
        valid,  # under a stranger's id
        b"",
    ]


async def connected(connections: Connections, role: str) -> NatsTransport:
    return await connect(connections, role, name="stranger", publish_timeout_seconds=60.0)


async def attack(connections: Connections) -> tuple[int, int]:
    num_published = 0
    for record_type, role in PRODUCERS.items():
        transport = await connected(connections, role)
        subject = loop.subject(JOB, connections.uid, record_type)
        for number, data in enumerate(hostile(record_type)):
            headers = {"traceparent": "00-zz", "sent": "inf", "number": "\N{SNOWMAN}"[: number % 2]}
            await transport.publish(subject, data, id=f"hostile {number}", key=f"hostile-{number}", headers=headers)
            num_published += 1
        with pytest.raises(MessageTooLarge):
            await transport.publish(subject, bytes(16 << 20), id="huge")
        await transport.publish(
            loop.dead_letters(JOB, connections.uid), b"{}", id=f"{role} wrote this", key=f"{role}-letter"
        )
        for other in set(EXAMPLES) - {kind for kind in EXAMPLES if kind in loop.BY_NAME[role].produces}:
            with pytest.raises(InvalidRequest, match=r"(?i)permission"):
                await transport.publish(loop.subject(JOB, connections.uid, other), b"", id="not mine")
        await transport.close()
    return num_published, await buried(connections)


async def strange_workers(connections: Connections) -> None:
    transport = await connected(connections, "reward")
    here: dict[str, Any] = {"job": JOB, "host": "h", "pid": 1, "grpc_address": "", "http_address": ""}
    lies: list[records.Record] = [
        records.WorkerInfo(id="a", stage="reward", worker=9, **here),
        records.WorkerInfo(id="b", stage="nobody", worker=1, **here),
        records.Heartbeat(
            id="c", job=JOB, stage="nobody", worker=1, doing="working", what="!", since_seconds=float("nan"),
            overdue_seconds=float("inf"), busy_seconds=-1.0,
        ),
    ]  # fmt: skip
    for lie in lies:
        subject = loop.subject(JOB, connections.uid, type(lie))
        await transport.publish(subject, encode(lie), id=f"{connections.uid}/{lie.id}", key=lie.id)
    await transport.close()


async def buried(connections: Connections) -> int:
    transport = await connected(connections, "control")
    watching = await transport.watch(loop.dead_letters(JOB, connections.uid))
    letters = []
    while found := await watching.pull(512, 5.0):
        letters += found
    await transport.close()
    reasons = [dead_letters.decode(letter.data).reason for letter in letters if letter.data != b"{}"]
    assert all(reason.startswith("malformed record: ") for reason in reasons), reasons
    return len(reasons)


async def strangers_are_not_let_in(connections: Connections, folder: Path) -> None:
    key = NatsProof(nkey_seed=connections.credentials / "generator.seed")
    stranger = ssl.create_default_context()
    for options in (
        {},
        {"tls": client_tls(connections.credentials, "generator")},
        {"proof": key},
        {"proof": key, "tls": stranger},
    ):
        with pytest.raises(RLHFSpecError):
            await NatsTransport.connect(connections.nats_url, name="stranger", **options)  # type: ignore[arg-type]


def test_hostile_messages_are_counted_and_change_nothing(job_file: Path, starting: Callable[..., Started]) -> None:
    hold = hold_rewards(job_file, "0 many")
    whole: list[dict[str, Any]] = train(job_file, "one")
    run = starting("many")
    run.until("3 steps of")
    connections = Connections.read(run.folder / "processes" / "connections.json")
    num_published, num_buried = asyncio.run(attack(connections))
    asyncio.run(strange_workers(connections))
    asyncio.run(strangers_are_not_let_in(connections, job_file.parent))
    hold.unlink()
    run.ends()
    run.check_alike(whole)
    refused = [line for log in run.folder.glob("logs/*.jsonl") for line in log.read_text().splitlines()
               if "is refused" in json.loads(line)["message"]]  # fmt: skip
    assert num_published >= 60
    assert num_buried >= 4 * len(hostile(records.Sample)), "each stage buries what it was given"
    assert len(refused) >= num_buried
