"""Credentials of a release in a cluster, all derived deterministically from one Secret, the `Keys`.

The operator never reads Secrets of jobs: it derives the same bytes for every apply. A generator that may help a
scoring stage has a separate key for that.

| file in a role's Secret | purpose |
|---|---|
| `ca.pem`, `ROLE.pem`, `ROLE.key` | TLS between workers: CA of the job, certificate of the role |
| `ROLE.creds` | NATS: token with the role's rights in this run, and its seed |
| `ranks.secret` | trainer only: authentication of ranks on several nodes |
| `serve.token` | gateway only: token of its clients |
| `redis.user`, `redis.password` | `control` only, which writes the live state |
| `servers-ca.pem` | CA of NATS, Redis and the operator's endpoint |

Example:
    >>> keys = Keys(bytes(32), new_account_seed(), *new_authority(datetime(2026, 1, 1, tzinfo=UTC)))
    >>> created = datetime(2026, 1, 2, tzinfo=UTC)
    >>> told = {"namespace": "rl", "job": "sums", "job_uid": "6f1c", "run": "c0e43711", "created": created}
    >>> data = credentials_of(keys, **told, role="reward")
    >>> sorted(data)
    ['ca.pem', 'reward.creds', 'reward.key', 'reward.pem', 'servers-ca.pem']
    >>> data == credentials_of(keys, **told, role="reward")
    True
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Self

from rlhfspec.cluster import names
from rlhfspec.common.ranks import SECRET_FILE
from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.access.connections import CLIENT_TOKEN
from rlhfspec.messages.access.rights import BUS_ROLES, GUESTS, RoleRights, inbox_of, rights_of
from rlhfspec.messages.loop import GATEWAY
from rlhfspec.messages.servers import shared
from rlhfspec.messages.servers.credentials import jwt
from rlhfspec.messages.servers.credentials.certificates import Authority
from rlhfspec.messages.servers.credentials.derived import ACCOUNT_KEY, OPERATOR_KEY, USER_KEY, derived, nkey_seed
from rlhfspec.runs.live import redis_users
from rlhfspec.runs.live.redis_users import DASHBOARD, PASSWORD_FILE, USER_FILE, ClusterRun

JOB_LIFETIME = timedelta(days=1096)  # of certificates, from the job's creation; longer than any job runs
RELEASE_LIFETIME = timedelta(days=3652)
_JETSTREAM = "$JS.API"


@dataclass(frozen=True)
class Keys:
    """Contents of the Secret `RELEASE-keys`; `master` has at least 32 bytes."""

    master: bytes
    account_seed: bytes
    ca_pem: bytes
    ca_key: bytes

    @classmethod
    def of(cls, data: Mapping[str, bytes]) -> Self:
        """Parse the data of the Secret, or raise InvalidRequest."""
        missing = {"master", "account.seed", "ca.pem", "ca.key"} - data.keys()
        if missing:
            raise InvalidRequest("keys", ", ".join(sorted(missing)), "missing in the release's Secret")
        if len(data["master"]) < 32:
            raise InvalidRequest("master", f"{len(data['master'])} bytes", "must be 32 bytes or more")
        return cls(data["master"], data["account.seed"].strip(), data["ca.pem"], data["ca.key"])

    def data(self) -> dict[str, bytes]:
        return {
            "master": self.master, "account.seed": self.account_seed, "ca.pem": self.ca_pem, "ca.key": self.ca_key
        }  # fmt: skip


def new_keys() -> Keys:
    return Keys(os.urandom(32), new_account_seed(), *new_authority(datetime.now(UTC)))


def new_account_seed() -> bytes:
    return nkey_seed(os.urandom(32), ACCOUNT_KEY).encode()


def new_authority(begin: datetime) -> tuple[bytes, bytes]:
    authority = Authority.derived(os.urandom(32), "rlhfspec", begin, RELEASE_LIFETIME)
    return authority.certificate, authority.private_key


def credentials_of(
    keys: Keys, *, namespace: str, job: str, job_uid: str, run: str, role: str, created: datetime
) -> dict[str, bytes]:
    """Return the data of a role's Secret; `created` is the job's creation time."""
    if role not in (*names.ROLES, *BUS_ROLES):
        raise InvalidRequest("role", role, f"must be one of {', '.join(names.ROLES)}")
    secret = derived(keys.master, "job", job_uid)
    authority = _authority(secret, job_uid, created.replace(microsecond=0))
    data = {"ca.pem": authority.certificate, "servers-ca.pem": keys.ca_pem}
    if role == names.PREPARE:
        return data  # prepare uses no server
    data[f"{role}.pem"], data[f"{role}.key"] = authority.issue(role, [names.WORKER_HOST])
    if role == names.CONTROL:
        data[USER_FILE] = redis_users.user_of(keys.master, ClusterRun(namespace, run)).encode()
        data[PASSWORD_FILE] = redis_users.password_of(keys.master, run, role).encode()
    if role == GATEWAY.name:
        data[CLIENT_TOKEN] = derived(secret, "clients").hex().encode()
    if role == "trainer":
        data[SECRET_FILE] = derived(secret, "ranks", run).hex().encode()
    for acts_as in (role, *GUESTS.get(role, ())):
        seed = nkey_seed(secret, USER_KEY, run, role, acts_as)
        name = f"{job}/{run}/{role}" + (f" as {acts_as}" if acts_as != role else "")
        issued = int(created.timestamp())
        data[f"{acts_as}.creds"] = _creds(keys, seed, name, rights_of(acts_as, job, run), issued)
    return data


@lru_cache(8)  # all roles of a job are requested together
def _authority(secret: bytes, job_uid: str, begin: datetime) -> Authority:
    return Authority.derived(secret, f"rlhfspec job {job_uid}", begin, JOB_LIFETIME)


def _creds(keys: Keys, seed: str, name: str, rights: RoleRights, issued: int = 0) -> bytes:
    account = keys.account_seed.decode()
    token = jwt.user_jwt(account, seed, name, publish=rights.publish, subscribe=rights.subscribe, issued=issued)
    return jwt.creds_file(token, seed)


def operator_creds(keys: Keys) -> bytes:
    """Return NATS credentials to manage the streams of all runs."""
    calls = ("STREAM.NAMES", "STREAM.INFO.*", "STREAM.CREATE.*", "STREAM.DELETE.*", "CONSUMER.CREATE.*.*")
    publish = tuple(f"{_JETSTREAM}.{call}" for call in calls)
    return _release_creds(keys, "operator", publish, ())


def dashboard_creds(keys: Keys) -> bytes:
    """Return NATS credentials with read access to every run."""
    in_one_run = rights_of("view", "job", "run").subscribe
    looks_on = tuple(each.replace("rlhf.job.run.", "rlhf.*.*.") for each in in_one_run if "rlhf." in each)
    return _release_creds(keys, DASHBOARD, (f"{_JETSTREAM}.STREAM.INFO.*", f"{_JETSTREAM}.STREAM.MSG.GET.*"), looks_on)


def _release_creds(keys: Keys, role: str, publish: tuple[str, ...], subscribe: tuple[str, ...]) -> bytes:
    rights = RoleRights(publish, (f"{inbox_of(role, 'release')}.>", *subscribe))
    return _creds(keys, nkey_seed(keys.master, USER_KEY, "release", role), f"rlhfspec/{role}", rights)


def install_secrets(keys: Keys, *, namespace: str, release: str, created: datetime) -> dict[str, dict[str, bytes]]:
    """Return the data of all Secrets of an install, by name."""
    begin = created.replace(microsecond=0)
    authority = Authority.of_pem(derived(keys.master, "release"), keys.ca_pem, keys.ca_key, begin, RELEASE_LIFETIME)

    def server(name: str) -> dict[str, bytes]:
        service = f"{release}-{name}"
        domains = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
        certificate, key = authority.issue(service, [f"{service}{domain}" for domain in domains])
        return {shared.CERTIFICATE_FILE: certificate, shared.KEY: key, shared.AUTHORITY: keys.ca_pem}

    return {
        f"{release}-keys": keys.data(),
        f"{release}-nats": server("nats") | {"nats.conf": nats_config(keys)},
        f"{release}-redis": server("redis") | {"redis.conf": shared.redis_config(), "users.acl": _redis_users(keys)},
        f"{release}-operator-tls": server("operator"),
        f"{release}-dashboard": {
            "dashboard.creds": dashboard_creds(keys),
            USER_FILE: redis_users.dashboard_user(keys.master).encode(),
            PASSWORD_FILE: redis_users.password_of(keys.master, DASHBOARD).encode(),
            "servers-ca.pem": keys.ca_pem,
        },
    }


def nats_config(keys: Keys) -> bytes:
    operator, system = (
        nkey_seed(keys.master, OPERATOR_KEY),
        jwt.public_key(nkey_seed(keys.master, ACCOUNT_KEY, "system")),
    )
    jobs = jwt.public_key(keys.account_seed.decode())
    accounts = {
        system: jwt.account_jwt(operator, system, "SYS", jetstream=False),
        jobs: jwt.account_jwt(operator, jobs, "JOBS", jetstream=True),
    }
    token = jwt.operator_jwt(operator, system_account=system)
    return shared.nats_config(token, accounts, system)


def _redis_users(keys: Keys) -> bytes:
    """Return the Redis ACL file with the operator's user only."""
    return shared.redis_users({redis_users.OPERATOR: redis_users.rules_of_operator(keys.master)})
