"""What a NATS server in operator mode lets in: tokens that name a key and what it may do, each signed by the one above.

The server knows the operator and, preloaded, its accounts. A user shows a token that its account's key signed, and
proves with its seed that the token is its own; the server never has to hear of a user beforehand.

Example:
    >>> from rlhfspec.messages.servers.credentials.derived import ACCOUNT_KEY, USER_KEY, nkey_seed
    >>> account, user = nkey_seed(bytes(32), ACCOUNT_KEY), nkey_seed(bytes(32), USER_KEY, "reward")
    >>> token = user_jwt(account, user, "reward", publish=["rlhf.sums.3f2a.score"], subscribe=[])
    >>> claims_of(token)["nats"]["pub"], claims_of(token)["nats"]["sub"]
    ({'allow': ['rlhf.sums.3f2a.score']}, {'deny': ['>']})
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import nkeys

UNLIMITED = -1
_LIMITS_OF_A_CLIENT = {"subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED}
_LIMITS_OF_AN_ACCOUNT = {
    **_LIMITS_OF_A_CLIENT, "imports": UNLIMITED, "exports": UNLIMITED, "wildcards": True, "conn": UNLIMITED,
    "leaf": UNLIMITED,
}  # fmt: skip
_LIMITS_OF_JETSTREAM = {
    "mem_storage": UNLIMITED, "disk_storage": UNLIMITED, "streams": UNLIMITED, "consumer": UNLIMITED,
}  # fmt: skip


def public_key(seed: str) -> str:
    key: bytes = nkeys.from_seed(bytearray(seed.encode())).public_key
    return key.decode()


def operator_jwt(operator_seed: str, *, system_account: str) -> str:
    """Signed by itself."""
    return _signed(operator_seed, public_key(operator_seed), "rlhfspec", "operator", {"system_account": system_account})


def account_jwt(operator_seed: str, account: str, name: str, *, jetstream: bool) -> str:
    """`account`: its public key."""
    limits = _LIMITS_OF_AN_ACCOUNT | (_LIMITS_OF_JETSTREAM if jetstream else {})
    claims = {"limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    return _signed(operator_seed, account, name, "account", claims)


def user_jwt(
    account_seed: str, user_seed: str, name: str, *, publish: Sequence[str], subscribe: Sequence[str], issued: int = 0
) -> str:
    """`issued`: seconds since 1970; nothing depends on it but what a person reads."""
    claims = {"pub": _allowed(publish), "sub": _allowed(subscribe), **_LIMITS_OF_A_CLIENT}
    return _signed(account_seed, public_key(user_seed), name, "user", claims, issued)


def creds_file(token: str, user_seed: str) -> bytes:
    """What every NATS client reads."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    ).encode()


def claims_of(token: str) -> dict[str, Any]:
    """Not verified."""
    claims = token.split(".")[1]
    parsed: dict[str, Any] = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return parsed


def _allowed(subjects: Sequence[str]) -> dict[str, list[str]]:
    """An empty list would allow everything."""
    return {"allow": list(subjects)} if subjects else {"deny": [">"]}


def _signed(issuer_seed: str, subject: str, name: str, kind: str, nats: dict[str, Any], issued: int = 0) -> str:
    claims = {
        "iat": issued, "iss": public_key(issuer_seed), "name": name, "sub": subject,
        "nats": {**nats, "type": kind, "version": 2},
    }  # fmt: skip
    claims["jti"] = base64.b32encode(hashlib.sha256(_json(claims)).digest()).decode().rstrip("=")
    content = f"{_word(_json({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_word(_json(claims))}"
    signature = nkeys.from_seed(bytearray(issuer_seed.encode())).sign(content.encode())
    return f"{content}.{_word(signature)}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _word(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
