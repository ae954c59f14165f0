"""Credentials of a NATS client: an NKEY, or a token signed by its account."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

from rlhfspec.errors import InvalidRequest

_CREDS = re.compile(rb"BEGIN NATS USER JWT-+\s+\S+\s+-+END.*BEGIN USER NKEY SEED-+\s+(?P<seed>\S+)\s", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsProof:
    """Credential file of a client: an NKEY seed, a token, or none."""

    nkey_seed: Path | None = None
    creds: Path | None = None

    def __str__(self) -> str:
        if self.creds is not None:
            return f"the token in {self.creds}"
        if self.nkey_seed is not None:
            return f"the key in {self.nkey_seed}"
        return "a connection without credentials"

    def check(self) -> None:
        """Validate the credential file, which nats-py would not name in errors."""
        if self.creds is not None:
            found = _CREDS.search(_read("creds", self.creds))
            if found is None:
                raise InvalidRequest("creds", str(self.creds), "is not a NATS credentials file")
            _check_seed("creds", self.creds, found["seed"])
        elif self.nkey_seed is not None:
            _check_seed("nkey_seed", self.nkey_seed, _read("nkey_seed", self.nkey_seed).strip())

    def options(self) -> dict[str, Any]:
        """Return options for nats-py, which reads the file again at every connect."""
        if self.creds is not None:
            return {"user_credentials": str(self.creds)}
        return {"nkeys_seed": None if self.nkey_seed is None else str(self.nkey_seed)}


NO_PROOF = NatsProof()


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(field, str(path), f"cannot be read: {error.strerror}") from error


def _check_seed(field: str, path: Path, seed: bytes) -> None:
    try:
        nkeys.from_seed(bytearray(seed)).wipe()
    except (nkeys.NkeysError, ValueError) as error:
        raise InvalidRequest(field, str(path), "is not an NKEY seed") from error
