"""Users and rights in a Redis that a cluster's runs share: one user for each run's control, none for workers.

Names and passwords derive from the install's secret, so nothing is stored and installs may share a server.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from dataclasses import dataclass

from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.servers.credentials.derived import derived
from rlhfspec.messages.servers.shared import redis_rules

REDIS_PREFIX = "rlhfspec"  # prefix of all keys, and of all users except the operator
OPERATOR = "operator"
DASHBOARD = "dashboard"
USER_FILE, PASSWORD_FILE = "redis.user", "redis.password"  # in a credentials folder
_WRITE, _READ = ("set", "del"), ("get", "pttl")
_MANAGE = ("acl|users", "acl|setuser", "acl|deluser", "scan", "unlink")


@dataclass(frozen=True, slots=True)
class ClusterRun:
    namespace: str
    uid: str


def install_of(master: bytes) -> str:
    """Return this install's unique public id, derived from its secret."""
    return derived(master, "install", length=6).hex()


def live_key(run: str) -> str:
    return f"{REDIS_PREFIX}:{run}:live"


def user_of(master: bytes, run: ClusterRun) -> str:
    return f"{REDIS_PREFIX}:{install_of(master)}:{run.namespace}:{run.uid}:{CONTROL}"


def run_of(master: bytes, user: str) -> ClusterRun | None:
    match user.split(":"):
        case [prefix, install, namespace, uid, _] if (prefix, install) == (REDIS_PREFIX, install_of(master)):
            return ClusterRun(namespace, uid)
    return None


def dashboard_user(master: bytes) -> str:
    return f"{REDIS_PREFIX}:{install_of(master)}:{DASHBOARD}"


def password_of(master: bytes, *whose: str) -> str:
    """Return the password derived for `whose`: a run's role (uid, role) or an observer (name)."""
    return urlsafe_b64encode(derived(master, "redis", *whose)).decode().rstrip("=")


def rules_of(master: bytes, run: ClusterRun) -> list[str]:
    key = live_key(run.uid)
    return redis_rules(password_of(master, run.uid, CONTROL), writes=[key], reads=[key], commands=(*_WRITE, *_READ))


def rules_of_dashboard(master: bytes) -> list[str]:
    return redis_rules(password_of(master, DASHBOARD), writes=(), reads=[f"{REDIS_PREFIX}:*"], commands=_READ)


def rules_of_operator(master: bytes) -> list[str]:
    """Return the operator's ACL rules, to manage users and delete keys without reading them."""
    return redis_rules(password_of(master, OPERATOR), writes=[f"{REDIS_PREFIX}:*"], reads=(), commands=_MANAGE)
