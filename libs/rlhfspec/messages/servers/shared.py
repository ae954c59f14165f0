"""Configuration files of NATS and Redis servers that many jobs share.

NATS runs in operator mode (`servers.credentials.jwt`). Redis starts with the operator as only user. Both use TLS and
require no client certificate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from rlhfspec.messages.servers.nats import MAX_PAYLOAD_BYTES, quoted
from rlhfspec.messages.servers.redis import MAX_MEMORY

CERTIFICATE_FILE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.pem"
NATS_FOLDER, REDIS_FOLDER = PurePosixPath("/etc/nats"), PurePosixPath("/etc/redis")  # mount paths in the pods
NATS_STORE = PurePosixPath("/data")
NATS_PORT, NATS_HTTP_PORT, REDIS_PORT = 4222, 8222, 6379
MAX_CONTROL_LINE_BYTES = 1 << 16  # a role's token is one line; the server's default is 4 KiB


def nats_config(operator: str, accounts: Mapping[str, str], system_account: str) -> bytes:
    """Return the NATS configuration; `accounts` maps public keys to tokens."""
    preloaded = [f"  {account}: {quoted(token)}" for account, token in accounts.items()]
    lines = [
        f"port: {NATS_PORT}",
        f"http_port: {NATS_HTTP_PORT}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        f"max_control_line: {MAX_CONTROL_LINE_BYTES}",
        f"jetstream {{ store_dir: {quoted(NATS_STORE)} }}",
        "tls {",
        f"  cert_file: {quoted(NATS_FOLDER / CERTIFICATE_FILE)}",
        f"  key_file: {quoted(NATS_FOLDER / KEY)}",
        '  min_version: "1.2"',
        "}",
        f"operator: {quoted(operator)}",
        f"system_account: {system_account}",
        "resolver: MEMORY",
        "resolver_preload: {",
        *preloaded,
        "}",
        "",
    ]
    return "\n".join(lines).encode()


def redis_config() -> bytes:
    lines = [
        "port 0",
        f"tls-port {REDIS_PORT}",
        f"tls-cert-file {REDIS_FOLDER / CERTIFICATE_FILE}",
        f"tls-key-file {REDIS_FOLDER / KEY}",
        f"tls-ca-cert-file {REDIS_FOLDER / AUTHORITY}",
        "tls-auth-clients no",  # users have names and passwords
        "protected-mode no",  # the default user is off
        f"aclfile {REDIS_FOLDER / 'users.acl'}",
        'save ""',  # nothing on disk: processes publish everything again
        "appendonly no",
        f"maxmemory {MAX_MEMORY}",
        "maxmemory-policy allkeys-lru",
        "databases 1",
        "",
    ]
    return "\n".join(lines).encode()


def redis_users(users: Mapping[str, Sequence[str]]) -> bytes:
    """Return an ACL file of users with their `ACL SETUSER` rules."""
    lines = ["user default off", *(" ".join(["user", name, *rules]) for name, rules in users.items()), ""]
    return "\n".join(lines).encode()


def redis_rules(password: str, *, writes: Sequence[str], reads: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Return ACL rules that replace a user's rights, with key patterns to write and read."""
    keys = [f"%W~{pattern}" for pattern in writes] + [f"%R~{pattern}" for pattern in reads]
    proof = f"#{hashlib.sha256(password.encode()).hexdigest()}"
    return ["reset", "on", proof, *keys, "-@all", "+ping", *(f"+{command}" for command in commands)]
