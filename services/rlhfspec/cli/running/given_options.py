"""`rlhfspec run --processes --nats URL --redis URL`: servers of the user's in place of the run's own.

A secret is never printed again: what is taken from the environment is shown as `${NAME}`, and so is what was written
out. Everything that can be wrong about the options alone is said here, before anything else is done.

Example:
    >>> import os
    >>> os.environ["NATS_PASSWORD"] = "p@ss/word"
    >>> options = GivenOptions(nats="tls://rl:${NATS_PASSWORD}@nats.example", redis=None)
    >>> given = options.read(processes=True)
    >>> given.nats.url, given.nats.user, given.nats.password, given.redis
    ('tls://nats.example:4222', 'rl', 'p@ss/word', None)
    >>> GivenOptions(nats="nats://rl:s3cret@localhost").words()
    ['--nats', 'nats://rl:${NATS_PASSWORD}@localhost']
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import typer

from rlhfspec.errors import InvalidRequest
from rlhfspec.job.file.secrets import filled_in, shown_url
from rlhfspec.messages.servers.given import CA, CERTIFICATE, NATS, REDIS, GivenServer

PANEL = "Servers of your own, with --processes"
NATS_OPTION, REDIS_OPTION, KEY_OPTION = "--nats", "--redis", "--servers-key"
FILE_OPTIONS = {NATS_OPTION: "--nats-credentials", REDIS_OPTION: "--redis-credentials"}
EXAMPLES = {
    NATS_OPTION: "nats://host:4222, or tls://me:${NATS_PASSWORD}@host:4222",
    REDIS_OPTION: "redis://host:6379, or rediss://me:${REDIS_PASSWORD}@host:6379/0",
}
_SCHEMES = {NATS_OPTION: ("nats", "tls"), REDIS_OPTION: ("redis", "rediss")}
PORTS = {NATS_OPTION: "4222", REDIS_OPTION: "6379"}
PASSWORDS = {NATS_OPTION: "${NATS_PASSWORD}", REDIS_OPTION: "${REDIS_PASSWORD}"}
ALONE = {NATS_OPTION: "${NATS_TOKEN}", REDIS_OPTION: "${REDIS_USER}"}  # before the @, without a colon
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://((?P<login>.*)@)?(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(:(?P<port>\d+))?(/(?P<database>\d*))?",
    re.DOTALL,
)
_VARIABLE_ALONE = re.compile(r"\$\{\w+\}")

Nats = Annotated[
    str | None,
    typer.Option(
        NATS_OPTION, metavar="URL", rich_help_panel=PANEL,
        help="URL of a running NATS server with JetStream, instead of one that the run starts: 'nats://host:4222', or "
        "tls:// for TLS. A user goes into it, ${NAME} is taken from the environment: 'tls://me:${NATS_PASSWORD}@host'.",
    ),
]  # fmt: skip
Redis = Annotated[
    str | None,
    typer.Option(
        REDIS_OPTION, metavar="URL", rich_help_panel=PANEL,
        help="URL of a running Redis or Valkey server: 'redis://host:6379', or rediss:// for TLS.",
    ),
]  # fmt: skip
NatsCredentials = Annotated[
    Path | None,
    typer.Option(
        FILE_OPTIONS[NATS_OPTION], metavar="FILE", rich_help_panel=PANEL,
        help="Credentials for NATS: a .creds file, or the seed of an NKEY; with a user in the URL, "
        "'nats://me@host', a file with the password.",
    ),
]  # fmt: skip
RedisCredentials = Annotated[
    Path | None,
    typer.Option(
        FILE_OPTIONS[REDIS_OPTION], metavar="FILE", rich_help_panel=PANEL,
        help="File with the password for Redis, of the user in the URL or of the default user.",
    ),
]  # fmt: skip
ServersCa = Annotated[
    Path | None,
    typer.Option(
        CA, metavar="FILE", rich_help_panel=PANEL,
        help="CA certificates of the servers, as PEM.  [default: the CAs that this machine trusts]",
    ),
]  # fmt: skip
ServersCertificate = Annotated[
    Path | None,
    typer.Option(
        CERTIFICATE, metavar="FILE", rich_help_panel=PANEL,
        help="Client certificate for servers that ask for one, as PEM, with its key.",
    ),
]  # fmt: skip
ServersKey = Annotated[
    Path | None,
    typer.Option(KEY_OPTION, metavar="FILE", rich_help_panel=PANEL, help="Key of the client certificate, if separate."),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenServers:
    """None: the run starts its own."""

    nats: GivenServer | None = None
    redis: GivenServer | None = None

    def __bool__(self) -> bool:
        return self.nats is not None or self.redis is not None

    def __str__(self) -> str:
        return " and ".join(str(server) for server in (self.nats, self.redis) if server is not None)

    def keep(self, credentials: Path) -> None:
        for kind, server in ((NATS, self.nats), (REDIS, self.redis)):
            if server is not None:
                server.keep(credentials, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """As the user wrote them."""

    nats: str | None = None
    redis: str | None = None
    nats_credentials: Path | None = None
    redis_credentials: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def words(self) -> list[str]:
        """To be pasted into another command. Secrets that were written out are variables then."""
        urls = [(NATS_OPTION, self.nats), (REDIS_OPTION, self.redis)]
        pairs = [(option, self._shown(option, url)) for option, url in urls if url is not None]
        pairs += [(option, str(path)) for option, path in self._files.items() if path is not None]
        return [word for pair in pairs for word in pair]

    def read(self, *, processes: bool) -> GivenServers:
        """InvalidRequest for what cannot be meant so, and for files that are no use."""
        self._check(processes=processes)
        nats = None if self.nats is None else self._server(NATS_OPTION, self.nats)
        redis = None if self.redis is None else self._server(REDIS_OPTION, self.redis)
        servers = [server for server in (nats, redis) if server is not None]
        for option in (CA, CERTIFICATE):
            if self._files[option] is not None and not any(server.speaks_tls for server in servers):
                raise InvalidRequest(option, str(self._files[option]), "is for TLS: tls:// or rediss:// in a URL")
        for server in servers:
            server.tls()  # raises where a file is no use
        return GivenServers(nats=nats, redis=redis)

    @property
    def _files(self) -> dict[str, Path | None]:
        return {
            FILE_OPTIONS[NATS_OPTION]: self.nats_credentials,
            FILE_OPTIONS[REDIS_OPTION]: self.redis_credentials,
            CA: self.ca,
            CERTIFICATE: self.certificate,
            KEY_OPTION: self.key,
        }

    def _shown(self, option: str, url: str) -> str:
        """Beside a file with the password, what stands alone before the @ is a user."""
        return _without_secret(option, url) if self._files[FILE_OPTIONS[option]] is None else url

    def _check(self, *, processes: bool) -> None:
        given = {NATS_OPTION: self.nats, REDIS_OPTION: self.redis} | self._files
        first = next((option for option, value in given.items() if value is not None), None)
        if first is not None and not processes:
            shown = _without_secret(first, str(given[first]))
            raise InvalidRequest(first, shown, "only with --processes: a run in one process needs no server")
        needs = {file: option for option, file in FILE_OPTIONS.items()} | {KEY_OPTION: CERTIFICATE}
        for option, needed in needs.items():
            if given[option] is not None and given[needed] is None:
                raise InvalidRequest(option, str(given[option]), f"only with {needed}")
        if first in (CA, CERTIFICATE):
            raise InvalidRequest(first, str(given[first]), f"only with {NATS_OPTION} or {REDIS_OPTION}")

    def _server(self, option: str, url: str) -> GivenServer:
        place, user, password = _parts(option, url)
        key_file, file = None, self._files[FILE_OPTIONS[option]]
        if file is not None:
            if option == NATS_OPTION and not user:
                user, password = password, ""  # what stood alone
            if password:
                raise InvalidRequest(option, place, f"a password in the URL, or {FILE_OPTIONS[option]} FILE: not both")
            if user or option == REDIS_OPTION:
                password = _password_in(FILE_OPTIONS[option], file)
            else:
                key_file = file
        with_tls = place.startswith(_SCHEMES[option][1])
        return GivenServer(
            url=place,
            user=user,
            password=password,
            key_file=None if key_file is None else key_file.absolute(),
            authority=self.ca.absolute() if self.ca is not None and with_tls else None,
            certificate=self.certificate.absolute() if self.certificate is not None and with_tls else None,
            private_key=self.key.absolute() if self.key is not None and with_tls else None,
        )


def _password_in(option: str, file: Path) -> str:
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(option, str(file), f"cannot be read: {getattr(error, 'strerror', 'no text')}") from None
    if not password:
        raise InvalidRequest(option, str(file), "the file is empty")
    return password


def _parts(option: str, url: str) -> tuple[str, str, str]:
    """The URL without its user, the user, and the password; a variable may hold all of it."""
    whole = filled_in(url, option) if _VARIABLE_ALONE.fullmatch(url) else url
    shown = url if whole is not url else shown_url(url)
    login, at, place = whole.rpartition("@")
    if at and "://" in login:
        scheme, _, login = login.partition("://")
        place = f"{scheme}://{place}"
    found = _URL.fullmatch(filled_in(place, option))
    if found is None or found["scheme"] not in _SCHEMES[option] or (found["database"] and option == NATS_OPTION):
        raise InvalidRequest(option, shown, f"must be a URL such as {EXAMPLES[option]}")
    if int(found["port"] or 1) not in range(1, 1 << 16):
        raise InvalidRequest(option, shown, "its port must be from 1 to 65535")
    database = f"/{found['database']}" if found["database"] else ""
    user, password = _login(option, login if at else "")
    return f"{found['scheme']}://{found['host']}:{found['port'] or PORTS[option]}{database}", user, password


def _login(option: str, text: str) -> tuple[str, str]:
    """What stands alone is of Redis a user, of NATS a token."""
    name, colon, password = text.partition(":")
    if not colon and option == NATS_OPTION:
        return "", _plain(option, name)
    if colon and not password:
        raise InvalidRequest(option, f"{name}:", "the password is empty")
    return _plain(option, name), _plain(option, password)


def _plain(option: str, text: str) -> str:
    """A variable's value as it is; what is written out, as URLs write it (%40 for @)."""
    return filled_in(text, option) if "${" in text else unquote(text)


def _without_secret(option: str, url: str) -> str:
    """
    >>> _without_secret("--redis", "redis://:s3cret@host/0"), _without_secret("--nats", "nats://t0ken@host")
    ('redis://:${REDIS_PASSWORD}@host/0', 'nats://${NATS_TOKEN}@host')
    """
    found = re.fullmatch(r"(\w+://)(.*)@([^@]*)", url, re.DOTALL)
    if found is None:
        return url
    scheme, login, place = found.groups()
    user, colon, secret = login.partition(":")
    if colon and "${" not in secret:
        login = f"{user}:{PASSWORDS[option]}"
    elif not colon and "${" not in user:
        login = ALONE[option]
    return f"{scheme}{login}@{place}"
