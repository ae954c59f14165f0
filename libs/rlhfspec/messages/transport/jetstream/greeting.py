"""A NATS server's greeting, and readable reasons why a connection failed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlparse

from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.messages.transport.jetstream.proof import NatsProof

_OLDEST_SERVER = (2, 10, 26)  # older servers may keep messages for ever after a kill


async def read_info(url: str) -> dict[str, Any]:
    place = urlparse(url)
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 4222)
    except OSError as error:
        raise TransportUnavailable(url, f"no server there ({reason_of(error)})") from error
    try:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError
        if not line.startswith(b"INFO "):
            raise InvalidRequest("nats", url, "is not a NATS server")
        info: dict[str, Any] = json.loads(line.removeprefix(b"INFO "))
        return info
    except OSError as error:  # such as a proxy in front of a server that is starting
        raise TransportUnavailable(url, "the server closes the connection at once") from error
    except ValueError as error:
        raise InvalidRequest("nats", url, "is not a NATS server") from error
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def reason_of(error: OSError) -> str:
    """Return why a connection failed; resolver errors have negative numbers and their own texts.

    >>> reason_of(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")), reason_of(OSError("no way"))
    ('connection refused', 'no way')
    """
    if error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower()


def check_info(url: str, info: Mapping[str, Any], tls: ssl.SSLContext | None) -> None:
    version = str(info.get("version", ""))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < _OLDEST_SERVER:
        oldest = ".".join(map(str, _OLDEST_SERVER))
        raise InvalidRequest("nats", version, f"the server at {url} must be {oldest} or newer")
    if not info.get("jetstream"):
        raise InvalidRequest("nats", url, "the server must run with JetStream (nats-server -js)")
    if tls is not None and not info.get("tls_required"):
        raise InvalidRequest("nats", url, "the server must speak TLS, as this connection does")
    if tls is None and info.get("tls_required"):
        raise InvalidRequest("nats", url, "the server speaks TLS only: credentials with a CA are needed")


def explained(url: str, error: Exception, proof: NatsProof) -> Exception:
    if "authorization violation" in str(error).lower():
        return InvalidRequest("nats", url, f"the server refuses {proof}")
    if isinstance(error, ssl.SSLError):
        return InvalidRequest("nats", url, tls_problem(error))
    return TransportUnavailable(url, str(error).removeprefix("nats: ") or type(error).__name__)


def tls_problem(error: ssl.SSLError) -> str:
    """Return why TLS with a server failed; an alert comes from the server.

    >>> tls_problem(ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required"))
    "the server refuses this client's certificate: tlsv13 alert certificate required"
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate cannot be trusted: {error.verify_message}"
    said = re.sub(r"^\[.*?\] | \(_ssl\.c:\d+\)$", "", str(error.args[-1]))
    return f"the server refuses this client's certificate: {said}" if " alert " in said else f"TLS fails: {said}"
