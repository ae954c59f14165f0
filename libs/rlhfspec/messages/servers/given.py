"""A NATS or a Redis that is the user's, not the run's: how the run's processes reach it.

It lies beside the run's own keys, as nats.json or redis.json, for this user alone, and goes with them. Files that the
user named are named there, not copied, but for one with a password: what is renewed in them is seen by the next
connection.

Example:
    >>> given = GivenServer(url="rediss://cache.example:6379/0", user="rl", password="s3cret")
    >>> print(given)
    rediss://cache.example:6379/0
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> given.keep(folder, REDIS)
    >>> given_server(folder, REDIS) == given, given_server(folder, NATS)
    (True, None)
"""

from __future__ import annotations

import json
import ssl
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.servers.credentials.tls_words import said_of
from rlhfspec.messages.servers.program import write_secret

NATS, REDIS = "nats", "redis"
CA, CERTIFICATE = "--servers-ca", "--servers-certificate"  # by these options a user named the files
_WITH_TLS = ("tls", "rediss")
_FILES = ("key_file", "authority", "certificate", "private_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenServer:
    """`url`: without user and password. `password` without a user: of Redis, its default user's; of NATS, a token.
    `key_file`: in place of both, of NATS: a .creds file, or an NKEY's seed. `authority`: the signer of the server's
    certificate; None: as this machine trusts. `certificate`: where the server asks for one; `private_key`: None where
    that file has the key too."""

    url: str
    user: str = field(default="", repr=False)  # in a URL it may stand where a password was meant
    password: str = field(default="", repr=False)
    key_file: Path | None = None
    authority: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None

    def __str__(self) -> str:
        return self.url

    @property
    def speaks_tls(self) -> bool:
        return self.url.partition("://")[0] in _WITH_TLS

    def keep(self, folder: Path, kind: str) -> None:
        content = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        write_secret(folder / f"{kind}.json", json.dumps(content).encode())

    def tls(self) -> ssl.SSLContext | None:
        """To call it: only one with a certificate for its name will do. None: it speaks none."""
        if not self.speaks_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.authority)
        except OSError as error:  # ssl.SSLError is one
            raise InvalidRequest(CA, str(self.authority), _no_use(error, "certificates")) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.private_key, password=_refuse_to_ask)
            except OSError as error:
                raise InvalidRequest(
                    CERTIFICATE, str(self.certificate), _no_use(error, "certificate with its key")
                ) from None
        return context


def given_server(folder: Path | None, kind: str) -> GivenServer | None:
    """None: the run has its own, or shares one of a cluster. `folder`: the run's credentials."""
    path = None if folder is None else folder / f"{kind}.json"
    if path is None or not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        files = {name: Path(content[name]) for name in _FILES if content[name] is not None}
        return GivenServer(**(content | files))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest("credentials", str(path), f"cannot be read: {type(error).__name__}") from None


def _no_use(error: OSError, what: str) -> str:
    if isinstance(error, ssl.SSLError):
        return f"holds no usable {what}: {said_of(error)}"
    return f"cannot be read: {error.strerror}"


def _refuse_to_ask() -> str:
    """OpenSSL would ask the terminal for the key's passphrase, and wait."""
    raise ssl.SSLError("its key is encrypted")
