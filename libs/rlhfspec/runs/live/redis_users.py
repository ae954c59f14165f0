"""Who may do what in a Redis that the runs of a cluster share: a user for each role of each run.

The operator makes them while a run is open and takes them away with it. Names and passwords derive from the install's
secret, so nothing has to be kept, and several installs may share one server. Nobody but the operator may use a command
that names keys of others (SCAN, KEYS): the workers of a run are in an index of its own.

Example:
    >>> run = ClusterRun(namespace="team", uid="3f2a1b9c")
    >>> name = user_of(bytes(32), run, "reward")
    >>> name, run_of(bytes(32), name)
    ('rlhfspec:6eb63d927a08:team:3f2a1b9c:reward', ClusterRun(namespace='team', uid='3f2a1b9c'))
    >>> " ".join(rules_of(bytes(32), run, "reward"))[:12], run_of(b"of another install's secret.....", name)
    ('reset on #ef', None)
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL
from rlhfspec.messages.loop import STAGES
from rlhfspec.messages.servers.derived import derived
from rlhfspec.messages.servers.shared import redis_rules

REDIS_PREFIX = "rlhfspec"  # of all keys, and of all users but the operator's
OPERATOR = "operator"
DASHBOARD = "dashboard"
USER_FILE, PASSWORD_FILE = "redis.user", "redis.password"  # in a folder of credentials
WRITERS = (CONTROL, *(stage.name for stage in STAGES))  # whose processes run in pods
_READERS = (CONTROL, "view")
_WRITE, _READ = ("set", "del", "sadd", "pexpire"), ("get", "mget", "exists", "pttl", "smembers")
_MANAGE = ("acl|users", "acl|setuser", "acl|deluser", "scan", "unlink")


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """`namespace`: of its job; `uid`: the run's."""

    namespace: str
    uid: str


def install_of(master: bytes) -> str:
    """What tells this install from all others, also from the one that had its names before; no secret."""
    return derived(master, "install", length=6).hex()


# ---- keys -----------------------------------------------------------------------------------------------------------


def worker_key(run: str, worker: str) -> str:
    return f"{REDIS_PREFIX}:{run}:worker:{worker}"


def workers_key(run: str) -> str:
    """Names of all workers that wrote; of some the key may be gone."""
    return f"{REDIS_PREFIX}:{run}:workers"


def worker_keys(run: str, workers: Iterable[Any]) -> list[bytes]:
    """`workers`: as Redis has their names, whatever bytes these are."""
    return [worker_key(run, "").encode() + worker for worker in workers]


def window_key(run: str) -> str:
    return f"{REDIS_PREFIX}:{run}:window"


# ---- users ----------------------------------------------------------------------------------------------------------


def user_of(master: bytes, run: ClusterRun, role: str) -> str:
    return f"{REDIS_PREFIX}:{install_of(master)}:{run.namespace}:{run.uid}:{role}"


def run_of(master: bytes, user: str) -> ClusterRun | None:
    """None: no user of a run of this install."""
    match user.split(":"):
        case [prefix, install, namespace, uid, _] if (prefix, install) == (REDIS_PREFIX, install_of(master)):
            return ClusterRun(namespace, uid)
    return None


def dashboard_user(master: bytes) -> str:
    return f"{REDIS_PREFIX}:{install_of(master)}:{DASHBOARD}"


def password_of(master: bytes, *whose: str) -> str:
    """`whose`: a run's uid and a role, or whoever looks after all runs."""
    return urlsafe_b64encode(derived(master, "redis", *whose)).decode().rstrip("=")


def rules_of(master: bytes, run: ClusterRun, role: str) -> list[str]:
    """For `ACL SETUSER`: a worker writes what it does itself, control the view's window; who looks on reads all of the
    run."""
    if role not in BUS_ROLES:
        raise AssertionError(role)
    writes = [workers_key(run.uid), worker_key(run.uid, f"{role}-*")] if role in WRITERS else []
    writes += [window_key(run.uid)] if role == CONTROL else []
    reads = [f"{REDIS_PREFIX}:{run.uid}:*"] if role in _READERS else []
    commands = (*(_WRITE if writes else ()), *(_READ if reads else ()))
    return redis_rules(password_of(master, run.uid, role), writes=writes, reads=reads, commands=commands)


def rules_of_dashboard(master: bytes) -> list[str]:
    return redis_rules(password_of(master, DASHBOARD), writes=(), reads=[f"{REDIS_PREFIX}:*"], commands=_READ)


def rules_of_operator(master: bytes) -> list[str]:
    """It makes users, so it could make one that may do anything; by itself it can take keys away and read none."""
    return redis_rules(password_of(master, OPERATOR), writes=[f"{REDIS_PREFIX}:*"], reads=(), commands=_MANAGE)
