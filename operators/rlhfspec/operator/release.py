"""What the operator makes of the Secret RELEASE-keys, which it mounts: credentials of jobs, and its own.

A NATS or Redis that is not the release's own brings an account and authorities of its own, as files beside the keys.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from rlhfspec.errors import InvalidRequest
from rlhfspec.operator.broker import Purge
from rlhfspec.operator.observed import Credentials
from rlhfspec.service.credentials import Keys, credentials_of, operator_creds
from rlhfspec.service.rights import inbox_of

NATS_ACCOUNT, AUTHORITIES = "nats.account.seed", ("nats.ca.pem", "redis.ca.pem")
MOST_KNOWN = 2000  # Secrets that are kept, to sign none twice


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
    @lru_cache(MOST_KNOWN)
    def made(job: str, job_uid: str, run: str, role: str, created: datetime) -> Mapping[str, bytes]:
        return credentials_of(keys, job=job, job_uid=job_uid, run=run, role=role, created=created)

    return made


def purge_of(nats_url: str, keys: Keys) -> Purge:
    is_tls = urlsplit(nats_url).scheme == "tls"
    tls = ssl.create_default_context(cadata=keys.ca_pem.decode()) if is_tls else None
    return Purge(nats_url, operator_creds(keys), inbox_of("operator", "release"), tls)
