"""Is a Redis that the user gave fit for a run? Asked before anything of the run is there; each problem is one line that
names the option, and what to do: there, TLS as the URL says, the password, new enough, no cluster, and every command
that a run needs done once."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.servers.credentials.tls_words import is_alert, is_of_unknown_authority, tls_problem
from rlhfspec.messages.servers.given import CA, CERTIFICATE, GivenServer
from rlhfspec.messages.transport.jetstream.greeting import reason_of
from rlhfspec.runs.live.redis_client import client, close, failures, options_of, words_of
from rlhfspec.runs.live.redis_users import live_key

if TYPE_CHECKING:
    from redis.asyncio import Redis

_OPTION = "--redis"
_OLDEST_SERVER = (7, 0)  # of Redis; of Valkey every version
_SECONDS = 5.0
DEFAULT_PORT = 6379
KEEP_MILLISECONDS = 1000
RIGHTS = "docs/servers.md lists what a run needs"


async def check_redis(given: GivenServer, uid: str) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            await _greet(given)
        redis = client(given.url, _SECONDS, options_of(given))
        try:
            _check_server(given, await redis.info("server"))
            await _try_out(redis, uid)
        except failures() as error:
            raise _in_the_users_words(error, given) from None
        finally:
            await close(redis)
    except TimeoutError:
        raise InvalidRequest(_OPTION, given.url, f"no answer within {_SECONDS:g} s") from None


# ---- before any credentials -----------------------------------------------------------------------------------------


async def _greet(given: GivenServer) -> None:
    try:
        said = await _answer_to_ping(given, None)
        is_redis = said.startswith((b"+", b"-"))
        if given.speaks_tls:
            problem = (
                "the server speaks no TLS: write redis:// in place of rediss://" if is_redis else await _tls(given)
            )
        elif is_redis:
            problem = ""
        elif await _speaks_tls(given):
            problem = "the server speaks TLS only: write rediss:// in place of redis://"
        else:
            problem = "is no Redis server"
    except OSError as error:
        raise InvalidRequest(_OPTION, given.url, f"no server there ({reason_of(error)})") from None
    if problem:
        raise InvalidRequest(_OPTION, given.url, problem)


async def _answer_to_ping(given: GivenServer, tls: ssl.SSLContext | None) -> bytes:
    """Nothing: what listens there hangs up, as at bytes that are no TLS."""
    reader, writer = await _opened(given, tls)
    try:
        writer.write(b"PING\r\n")
        await writer.drain()
        return await reader.read(64)
    except ConnectionError:
        return b""
    finally:
        await _closed(writer)


async def _tls(given: GivenServer) -> str:
    """What is wrong with it. A server may look at a client's certificate once it has shaken hands, and hang up."""
    try:
        if await _answer_to_ping(given, given.tls()):
            return ""
    except ssl.SSLError as error:
        if not is_alert(error):
            return tls_problem(error) + (f"; {CA} FILE names its signer" if is_of_unknown_authority(error) else "")
    if given.certificate is None:
        return f"the server hangs up on clients without a certificate: name yours with {CERTIFICATE}"
    return f"the server hangs up on the certificate of {CERTIFICATE}: it is not one that it trusts"


async def _speaks_tls(given: GivenServer) -> bool:
    """With whomever: nothing is told to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await _opened(given, context)
    except ssl.SSLError as error:
        return is_alert(error)  # it wants more of us, in TLS
    except ConnectionError:
        return False
    await _closed(writer)
    return True


async def _opened(given: GivenServer, tls: ssl.SSLContext | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(given.url)
    return await asyncio.open_connection(place.hostname, place.port or DEFAULT_PORT, ssl=tls)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# ---- with them ------------------------------------------------------------------------------------------------------


def _check_server(given: GivenServer, about: dict[str, Any]) -> None:
    version = str(about.get("redis_version", ""))
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if "valkey_version" not in about and numbers < _OLDEST_SERVER:
        oldest = ".".join(map(str, _OLDEST_SERVER))
        raise InvalidRequest(_OPTION, version, f"the server at {given.url} must be Redis {oldest} or newer, or Valkey")
    if "cluster" in (about.get("redis_mode"), about.get("server_mode")):
        problem = "is a cluster, which spreads keys over its servers: a run needs one server that has all of them"
        raise InvalidRequest(_OPTION, given.url, problem)


async def _try_out(redis: Redis, uid: str) -> None:
    """All that the supervisor does, and those that show the run."""
    key = live_key(uid)
    await redis.set(key, b"trial", px=KEEP_MILLISECONDS)
    await redis.get(key)
    await redis.pttl(key)
    await redis.delete(key)


def _in_the_users_words(error: Exception, given: GivenServer) -> InvalidRequest:
    from redis import exceptions

    words = words_of(error)
    if isinstance(error, exceptions.AuthenticationError):
        return InvalidRequest(_OPTION, given.url, _login_problem(words, given))
    if isinstance(error, exceptions.NoPermissionError):
        return InvalidRequest(_OPTION, given.url, f"{words}; {RIGHTS}")
    if isinstance(error, exceptions.ReadOnlyError):
        return InvalidRequest(_OPTION, given.url, "is a replica that takes no writes: name its primary")
    if isinstance(error, exceptions.ResponseError):
        return InvalidRequest(_OPTION, given.url, f"the server refuses: {words}")
    return InvalidRequest(_OPTION, given.url, words)  # it is loading, or went away


def _login_problem(words: str, given: GivenServer) -> str:
    if not (given.user or given.password):
        return "the server asks for a password: redis://me:${REDIS_PASSWORD}@host:6379"
    if "without any password" in words:
        return "the server asks for no password: leave it out"
    return (
        f"the server refuses the user {given.user} with this password"
        if given.user
        else "the server refuses this password"
    )
