"""What a run has on servers that are not its own goes when the run does: its streams, and its keys.

The supervisor sees to that at the end (`forget`). For one that died its guardian does, while the run's credentials are
still there: `python -m rlhfspec.supervisor.forgetting CREDENTIALS ...`; or, where the guardians died too, the next run
of this user on this machine (`forget_dead`).
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rlhfspec.errors import RLHFSpecError
from rlhfspec.messages.servers.given import NATS, REDIS, GivenServer, given_server
from rlhfspec.messages.servers.program import write_secret

_SECONDS = 15.0  # for all of it
CREDENTIALS_FOLDER = "credentials"  # in the run's folder in memory
RUN_FILE = "run.json"  # in that one: whose they are


def note(credentials: Path, job: str, uid: str) -> None:
    """Written for the guardian that acts when the supervisor is dead."""
    write_secret(credentials / RUN_FILE, json.dumps({"job": job, "uid": uid}).encode())


def command_for(scratch: list[Path]) -> list[str]:
    """`scratch`: where the run's folder in memory may be."""
    return [
        sys.executable,
        "-m",
        "rlhfspec.supervisor.forgetting",
        *(str(path / CREDENTIALS_FOLDER) for path in scratch),
    ]


async def forget(nats: GivenServer | None, redis: GivenServer | None, job: str, uid: str) -> str:
    """What cannot be taken away now, in a line; nothing: all is gone. Keys end by themselves, half a minute later."""
    if redis is not None:
        await _forget_keys(redis, uid)
    return "" if nats is None else await _forget_streams(nats, job, uid)


def forget_dead(credentials: Path) -> str:
    """Forget a run that has no supervisor any more; as `forget`."""
    try:
        run = json.loads((credentials / RUN_FILE).read_bytes())
        nats, redis = given_server(credentials, NATS), given_server(credentials, REDIS)
    except (OSError, RLHFSpecError):  # it had servers of its own, or it is done already
        return ""
    return asyncio.run(forget(nats, redis, run["job"], run["uid"]))


async def _forget_streams(nats: GivenServer, job: str, uid: str) -> str:
    from rlhfspec.messages import loop
    from rlhfspec.messages.access.connecting import access_to
    from rlhfspec.messages.transport.nats import NatsTransport

    problem = "the server refuses, or does not answer"
    try:
        access = access_to(nats)
        async with asyncio.timeout(_SECONDS):
            transport = await NatsTransport.connect(
                nats.url, name="forgetting", inbox_prefix=access.inbox_prefix, proof=access.proof, tls=access.tls,
                publish_timeout_seconds=_SECONDS,
            )  # fmt: skip
            try:
                if all([await transport.undeclare(subject, _SECONDS) for subject in loop.subjects(job, uid)]):
                    return ""
            finally:
                await transport.close()
    except TimeoutError:
        problem = f"no answer within {_SECONDS:g} s"
    except RLHFSpecError as error:
        problem = str(error)
    return f"streams rlhf_{job}_{uid}_* are still at {nats.url}: {problem}"


async def _forget_keys(redis: GivenServer, uid: str) -> None:
    from rlhfspec.runs.live.redis_client import client, close, failures, options_of
    from rlhfspec.runs.live.redis_users import live_key

    connection = client(redis.url, _SECONDS, options_of(redis))
    try:
        async with asyncio.timeout(_SECONDS):
            await connection.delete(live_key(uid))
    except failures():
        pass
    finally:
        await close(connection)


if __name__ == "__main__":
    problems = [forget_dead(Path(folder)) for folder in sys.argv[1:]]
    sys.exit(any(problems))
