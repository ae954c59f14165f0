"""JWTs for NATS in operator mode: each grants rights to a key and is signed by the level above.

A user's token is signed by its account, so the server needs no list of users.
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
    return _signed(operator_seed, public_key(operator_seed), "rlhfspec", "operator", {"system_account": system_account})


def account_jwt(operator_seed: str, account: str, name: str, *, jetstream: bool) -> str:
    limits = _LIMITS_OF_AN_ACCOUNT | (_LIMITS_OF_JETSTREAM if jetstream else {})
    claims = {"limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    return _signed(operator_seed, account, name, "account", claims)


def user_jwt(
    account_seed: str, user_seed: str, name: str, *, publish: Sequence[str], subscribe: Sequence[str], issued: int = 0
) -> str:
    """Return a user's token, signed by the account; `issued` (Unix seconds) is only informative."""
    claims = {"pub": _allowed(publish), "sub": _allowed(subscribe), **_LIMITS_OF_A_CLIENT}
    return _signed(account_seed, public_key(user_seed), name, "user", claims, issued)


def creds_file(token: str, user_seed: str) -> bytes:
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    ).encode()


def _allowed(subjects: Sequence[str]) -> dict[str, list[str]]:
    """Return permissions for exactly these subjects; an empty allow list would allow all."""
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
