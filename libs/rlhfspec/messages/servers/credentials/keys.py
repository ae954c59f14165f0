"""NKEYs: by its seed a client proves to NATS which role it is; the server knows the public part only.

Example:
    >>> seed, public_key = new_nkey()
    >>> seed[:2], public_key[:1], len(public_key)
    ('SU', 'U', 56)
"""

from __future__ import annotations

import os

import nkeys


def new_nkey() -> tuple[str, str]:
    """A user's seed and public key."""
    seed: bytes = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public_key: bytes = nkeys.from_seed(seed).public_key
    return seed.decode(), public_key.decode()
