"""Credentials from the mounted Secret `RELEASE-keys`, which has more files for external servers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.messages.servers.credentials.derived import derived
from rlhfspec.operator.settings import Credentials, OperatorFile, Proof
from rlhfspec.operator.shared.credentials import Keys, credentials_of, operator_creds
from rlhfspec.operator.shared.leftovers import Server
from rlhfspec.operator.shared.redis_users import RedisUsers
from rlhfspec.operator.shared.streams import Streams
from rlhfspec.runs.live.redis_users import OPERATOR, install_of, password_of

REDIS_LOGIN = ("redis.username", "redis.password")
NATS_ACCOUNT, AUTHORITIES = "nats.account.seed", ("nats.ca.pem", "redis.ca.pem")
_MAX_CACHED_SECRETS = 2000  # Secrets cached to avoid signing twice


def keys_of(folder: Path) -> Keys:
    try:
        data = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise InvalidRequest("--keys", str(folder), f"cannot be read: {error.strerror}") from None
    if NATS_ACCOUNT in data:
        data["account.seed"] = data[NATS_ACCOUNT]
    if "ca.pem" in data:
        data["ca.pem"] = b"\n".join(
            [data["ca.pem"].strip(), *(data[name].strip() for name in AUTHORITIES if name in data)]
        )
    return Keys.of(data)


def credentials_by(keys: Keys) -> Credentials:
    @lru_cache(_MAX_CACHED_SECRETS)
    def made(namespace: str, job: str, job_uid: str, run: str, role: str, created: datetime) -> Mapping[str, bytes]:
        return credentials_of(keys, namespace=namespace, job=job, job_uid=job_uid, run=run, role=role, created=created)

    return made


def proof_by(keys: Keys) -> Proof:
    @lru_cache(_MAX_CACHED_SECRETS)
    def made(run: str, worker: str, last_pod: str) -> str:
        return derived(keys.master, "pod", run, worker, last_pod).hex()

    return made


def servers_of(told: OperatorFile, keys: Keys, folder: Path) -> list[Server]:
    """Return the NATS and Redis servers to maintain; `folder` holds the mounted keys."""
    tls = ssl.create_default_context(cadata=keys.ca_pem.decode()) if urlsplit(told.nats_url).scheme == "tls" else None
    inbox, install = inbox_of(OPERATOR, "release"), install_of(keys.master)
    servers: list[Server] = [Streams(told.nats_url, install, operator_creds(keys), inbox, tls)]
    if told.redis_url is not None:
        servers.append(RedisUsers(told.redis_url, keys.master, redis_login(keys, folder), keys.ca_pem))
    return servers


def redis_login(keys: Keys, folder: Path) -> tuple[str, str]:
    user, password = (folder / name for name in REDIS_LOGIN)
    if not user.exists():
        return OPERATOR, password_of(keys.master, OPERATOR)
    try:
        return user.read_text().strip(), password.read_text().strip()
    except OSError as error:
        raise InvalidRequest("--keys", str(password), f"cannot be read: {error.strerror}") from None
