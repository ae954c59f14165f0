"""Secrets that a job sends to reward endpoints: filled in from the environment, and hidden when shown.

Header values, and user, password, query and fragment of URLs are hidden.

>>> shown_url("https://me:pw@judge.example/v1?key=abc")
'https://...@judge.example/v1?...'
>>> shown_override("rewards.sources[0].headers.key=abc"), shown_override("training.steps=3")
('rewards.sources[0].headers.key=...', 'training.steps=3')
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.yaml_text import Path_, parts_of
from rlhfspec.job.rewards import HttpSource

HIDDEN = "..."
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def shown_url(url: str) -> str:
    """Return the URL with its query, its fragment and everything before the last `@` hidden."""
    url = re.sub(r"^(\w+://)?.*@", rf"\1{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"([?#]).*$", rf"\1{HIDDEN}", url, flags=re.DOTALL)


def shown_value(path: Path_, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shown_value((*path, name), child) for name, child in value.items()}
    if isinstance(value, list):
        return [shown_value(path, child) for child in value]
    if "headers" in path:
        return HIDDEN
    return shown_url(value) if isinstance(value, str) and (path[-1:] == ("url",) or "://" in value) else value


def shown_override(override: str) -> str:
    """Return the text of `--set` with secrets hidden."""
    name, equals, text = override.partition("=")
    if not equals:
        return HIDDEN if "header" in name or "://" in name else name
    path = parts_of(name.strip())
    if path[-1:] not in (("url",), ("path",)) and re.search("header|url|://", text):
        return f"{name}={HIDDEN}"
    return f"{name}={shown_value(path, text)}"


def holds_secrets(job: RLHFJob) -> bool:
    """Return whether the job contains secrets, not only names of environment variables."""
    sources = [source for source in job.spec.rewards.sources if isinstance(source, HttpSource)]
    sent = [value for source in sources for value in source.headers.values()]
    return any(not _VARIABLE.search(value) for value in sent) or any(_is_secret(source.url) for source in sources)


def _is_secret(url: str) -> bool:
    """Return whether the URL has a password, a token as user, a query value or a fragment."""
    parts = urlsplit(_VARIABLE.sub("", url))
    token = parts.username if parts.password is None else parts.password
    return bool(token or parts.fragment or any(pair.partition("=")[2] for pair in parts.query.split("&")))


def request_of(source: HttpSource, field: str) -> tuple[str, dict[str, str]]:
    """Return URL and headers to send, or raise InvalidRequest for unset variables and invalid values."""
    url = filled_in(source.url, f"{field}.url")
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # the message of this error may contain the password
        fits = False
    if not fits or not url.isprintable() or " " in url:
        raise InvalidRequest(f"{field}.url", shown_url(url), "must be a URL such as https://host:8000/score")
    headers = {}
    for name, text in source.headers.items():
        value = filled_in(text, f"{field}.headers.{name}")
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidRequest(f"{field}.headers", name, "is not a valid header name")
        if not (value.isascii() and value.isprintable() and value == value.strip()):
            raise InvalidRequest(f"{field}.headers.{name}", HIDDEN, "must be printable ASCII, without blanks around it")
        headers[name.lower()] = value
    return url, headers


def secrets_of(url: str, headers: Sequence[str]) -> list[str]:
    """Return the secret texts of at least 4 characters, which messages must mask."""
    parts = urlsplit(url)
    values = [pair.partition("=")[2] for pair in parts.query.split("&")]
    words = [word for value in headers for word in (value, *value.split())]
    found = {parts.username or "", parts.password or "", parts.query, parts.fragment, *values, *words}
    return sorted((text for text in found if len(text) >= 4), key=len, reverse=True)


def filled_in(text: str, field: str) -> str:
    """Replace `${NAME}` by environment variables; raise InvalidRequest for an unset one."""

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if not value:
            raise InvalidRequest(field, match[0], f"the environment variable {match[1]} is not set")
        return value

    return _VARIABLE.sub(value_of, text)
