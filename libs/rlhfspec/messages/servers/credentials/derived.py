"""Deterministic keys, derived from a secret and a purpose; no key reveals another."""

from __future__ import annotations

import json
import os

import nkeys
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

OPERATOR_KEY, ACCOUNT_KEY, USER_KEY = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def derived(secret: bytes, *purpose: str, length: int = 32) -> bytes:
    """Derive `length` bytes by HKDF; encoding purposes as JSON keeps them distinct."""
    return HKDF(hashes.SHA256(), length, salt=b"rlhfspec", info=json.dumps(purpose).encode()).derive(secret)


def ec_key(secret: bytes, *purpose: str) -> ec.EllipticCurvePrivateKey:
    """Derive a P-256 key; 16 extra bytes remove the modulo bias."""
    number = int.from_bytes(derived(secret, "ec", *purpose, length=48), "big")
    return ec.derive_private_key(number % (_P256_ORDER - 1) + 1, ec.SECP256R1())


def nkey_seed(secret: bytes, kind: int, *purpose: str) -> str:
    seed: bytes = nkeys.encode_seed(derived(secret, "nkey", *purpose), kind)
    return seed.decode()


def new_nkey() -> tuple[str, str]:
    """Return a new NATS user seed and its public key."""
    seed: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public_key: bytes = nkeys.from_seed(seed).public_key
    return seed.decode(), public_key.decode()
