"""Which visitors may look. Both ways begin with a token that a browser keeps in a cookie that no script can read.

`LaptopAccess`: one random token, in the URL that the command prints; with it one sees everything.
In a cluster the token is a user's own, and the API server says what it may (`review`).

Example:
    >>> token_of({"Authorization": "Bearer abc"}, ""), token_of({}, "abc"), token_of({}, "")
    ('abc', 'abc', '')
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

MOST_TOKEN_CHARACTERS = 16_384
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")

# Jobs, with curves and pods; what prompts and responses say, and processes at their end.
What = Literal["jobs", "texts"]


@dataclass(frozen=True, slots=True)
class Visitor:
    """`token` is never shown, logged or sent anywhere but to the API server."""

    name: str
    key: str  # a hash of the token
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Access(Protocol):
    """`errors.ServerFailed` where the question cannot be answered: then no visitor may."""

    is_local: bool  # for this machine's users: then only names of this machine are served, and cookies need no TLS

    async def visitor(self, token: str) -> Visitor | None:
        """None: this token is no visitor's."""
        ...

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool: ...


class LaptopAccess:
    is_local = True

    def __init__(self, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)

    async def visitor(self, token: str) -> Visitor | None:
        same = hmac.compare_digest(token.encode(), self.token.encode())
        return Visitor("you", "laptop") if same else None

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool:
        return True


def token_of(headers: Mapping[str, str], cookie: str) -> str:
    """What a request shows; empty: nothing that could be a token. A proxy's header comes before the cookie."""
    kind, _, given = headers.get("Authorization", "").partition(" ")
    token = given.strip() if kind.lower() == "bearer" else cookie
    return token if is_token(token) else ""


def is_token(text: str) -> bool:
    return len(text) <= MOST_TOKEN_CHARACTERS and _TOKEN.fullmatch(text) is not None
