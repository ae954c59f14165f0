"""Is a NATS that the user gave fit for a run? Asked before anything of the run is there; each problem is one line that
names the option, and what to do.

- `check_nats`: there, TLS as the URL says, new enough, JetStream for this user's account, room, large messages.
- `try_out`: the account makes streams, and messages go there and back. It needs the run's credentials.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.messages import loop
from rlhfspec.messages.access.connecting import access_to, connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.servers.credentials.tls_words import is_alert, is_of_unknown_authority
from rlhfspec.messages.servers.given import CA, CERTIFICATE, GivenServer
from rlhfspec.messages.transport.base import Consumer, Subscription
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.messages.transport.jetstream.connection import Connection, status_of
from rlhfspec.messages.transport.jetstream.greeting import read_info
from rlhfspec.messages.transport.nats import NatsTransport

_OPTION, _CREDENTIALS = "--nats", "--nats-credentials"
_SECONDS = 5.0
LEAST_STORAGE_BYTES = 8 << 20
NUM_STREAMS = len(loop.subjects("job", "uid"))
BYTES_PER_TOKEN = 34  # a sample takes some 25, its dead letter hardly more; and some room
BYTES_BESIDES = 64 << 10  # its texts and columns
RIGHTS = "docs/servers.md lists what a run needs"


async def check_nats(given: GivenServer, max_context: int) -> None:
    """`max_context`: tokens of the longest prompt and the longest response together."""
    needed_bytes = max_context * BYTES_PER_TOKEN + BYTES_BESIDES
    with named(given):
        async with asyncio.timeout(_SECONDS):
            info = await read_info(given.url)
        _check_tls(given, info)
        connection = await _opened(given, shows_certificate=bool(info.get("tls_verify")))
        try:
            if connection.max_payload < needed_bytes:
                raise InvalidRequest(_OPTION, given.url, _too_small(connection.max_payload, needed_bytes))
            _check_account(given, await _account(connection))
        finally:
            await connection.close()


async def _opened(given: GivenServer, *, shows_certificate: bool) -> Connection:
    """A server looks at a client's certificate once it has shaken hands; then it hangs up, or says why."""
    access = access_to(given)
    refused = f"the server hangs up on the certificate of {CERTIFICATE}: it is not one that it trusts"
    try:
        return await Connection.open(
            given.url, name="preflight", inbox_prefix=access.inbox_prefix, proof=access.proof, tls=access.tls,
            clock=SystemClock(), patience_seconds=_SECONDS, connect_timeout_seconds=_SECONDS,
        )  # fmt: skip
    except (TransportUnavailable, InvalidRequest) as error:
        hangs_up = isinstance(error.__cause__, ConnectionError)
        if shows_certificate and (
            hangs_up or (isinstance(error.__cause__, ssl.SSLError) and is_alert(error.__cause__))
        ):
            raise InvalidRequest(_OPTION, given.url, refused) from None
        raise


def _check_tls(given: GivenServer, info: Mapping[str, Any]) -> None:
    problem = ""
    if given.speaks_tls and not info.get("tls_required"):
        problem = "the server speaks no TLS: write nats:// in place of tls://"
    elif info.get("tls_required") and not given.speaks_tls:
        problem = "the server speaks TLS only: write tls:// in place of nats://"
    elif info.get("tls_verify") and given.certificate is None:
        problem = f"the server asks its clients for a certificate: name yours with {CERTIFICATE}"
    if problem:
        raise InvalidRequest(_OPTION, given.url, problem)


def _too_small(have: int, needed: int) -> str:
    return (
        f"takes messages of {have:,} bytes, and a sample of this job may have {needed:,}: "
        "raise max_payload in the server's configuration"
    )


async def _account(connection: Connection) -> dict[str, Any]:
    answer = await connection.ask("$JS.API.INFO", seconds=_SECONDS)
    if answer is None:
        raise TransportUnavailable(connection.url, f"no answer to $JS.API.INFO within {_SECONDS:g} s")
    if status_of(answer) == "503":
        return {"error": {"code": 503, "description": "JetStream not enabled for account"}}
    found: dict[str, Any] = json.loads(answer.data)
    return found


def _check_account(given: GivenServer, account: dict[str, Any]) -> None:
    if error := account.get("error"):
        problem = f"cannot be used: {error['description']}"
    else:
        problem = _limit_problem(account["tiers"].get("R1", {}) if account.get("tiers") else account)
    if problem:
        raise InvalidRequest(_OPTION, given.url, f"this user's account {problem}")


def _limit_problem(account: dict[str, Any]) -> str:
    """Of what it says for streams without replicas; a limit of -1 is none."""
    limits = account.get("limits", {})
    most, there = limits.get("max_streams", -1), account.get("streams", 0)
    if 0 <= most < there + NUM_STREAMS:
        return f"may have {most} streams and has {there}; a run makes {NUM_STREAMS}"
    room, used = limits.get("max_storage", -1), account.get("storage", 0)
    if 0 <= room < used + LEAST_STORAGE_BYTES:
        return f"may store {room:,} bytes and stores {used:,}; a run needs {LEAST_STORAGE_BYTES:,}"
    if limits.get("max_bytes_required"):
        return "wants every stream to say its size (max_bytes_required), and those of a run have none"
    return ""


# ---- with the run's credentials -------------------------------------------------------------------------------------


async def try_out(given: GivenServer, connections: Connections) -> None:
    """Its streams are gone afterwards."""
    job, uid = connections.job().metadata.name, connections.uid
    with named(given):
        transport = await connect(connections, CONTROL, name="preflight", publish_timeout_seconds=_SECONDS)
        try:
            await _there_and_back(transport, loop.trial(job, uid, "work"), loop.trial(job, uid, "state"))
        finally:
            await transport.close()


async def _there_and_back(transport: NatsTransport, work: str, state: str) -> None:
    consumer = Consumer(name="trial")
    await transport.declare(work, "work", [consumer])
    await transport.declare(state, "state")
    try:
        watching = await transport.watch(state)
        pulling = await transport.subscribe(work, consumer)
        for subject in (work, state):
            await transport.publish(subject, b"trial", id="trial", key="trial")
        await _arrives(watching, state)
        await (await _arrives(pulling, work)).ack()
    finally:
        for subject in (work, state):
            await transport.undeclare(subject, _SECONDS)


async def _arrives(reading: Subscription, subject: str) -> Any:
    messages = await reading.pull(1, _SECONDS)
    if not messages:
        raise InvalidRequest("permission denied", subject, "what is published there does not arrive")
    return messages[0]


# ---- in the user's words --------------------------------------------------------------------------------------------


@contextmanager
def named(given: GivenServer) -> Iterator[None]:
    """What goes wrong within is said of the option that it belongs to."""
    try:
        yield
    except TimeoutError:
        raise InvalidRequest(_OPTION, given.url, f"no answer within {_SECONDS:g} s") from None
    except TransportUnavailable as error:
        raise InvalidRequest(_OPTION, given.url, error.problem) from None
    except InvalidRequest as error:
        raise _in_the_users_words(error, given) from None


def _in_the_users_words(error: InvalidRequest, given: GivenServer) -> InvalidRequest:
    if error.field in (_OPTION, CA, CERTIFICATE):
        return error
    if error.field in ("creds", "nkey_seed"):
        no_kind = error.problem.startswith("is no ")
        problem = "is neither a .creds file nor the seed of a user's NKEY" if no_kind else error.problem
        return InvalidRequest(_CREDENTIALS, error.value, problem)
    if error.field == "permission denied":
        return InvalidRequest(_OPTION, error.value, f"{_not_allowed(error)}; {RIGHTS}")
    value = given.url if error.field == "subject" else error.value
    return InvalidRequest(_OPTION, value, error.problem + _help(error))


def _not_allowed(error: InvalidRequest) -> str:
    """Return the problem for the one user that all roles are on a given server; the option shows the subject."""
    return re.sub(r"^role \S+ may", "this user may", error.problem).replace(f" to {error.value}", " there")


def _help(error: InvalidRequest) -> str:
    if is_of_unknown_authority(error.__cause__):
        return f"; {CA} FILE names its signer"
    if "without credentials" in error.problem:
        return f": a user goes into the URL (nats://me:${{NATS_PASSWORD}}@host:4222), a file into {_CREDENTIALS}"
    return ""
