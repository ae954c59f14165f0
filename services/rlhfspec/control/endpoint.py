"""The operator's endpoint, as control speaks to it: JSON over TLS, with the token that its pod was given.

Standard library alone: one small request now and then, each over a connection of its own, since another operator may
lead by then. A redirection is never followed: the token is for this address.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from rlhfspec.errors import InvalidRequest

TIMEOUT_SECONDS = 5.0
MOST_SHOWN = 200  # bytes of an answer


class NotTaken(Exception):
    """Say in one line that the report did not arrive, or was refused."""


class Endpoint:
    """Post reports. url: the whole address. authority: a file with the CA that its certificate is of. token_file: read
    anew for every report, because tokens are replaced before they expire."""

    def __init__(self, url: str, authority: Path, token_file: Path) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname is None:
            raise InvalidRequest("report_url", url, "must be an https:// URL: a token is sent along")
        self._host, self._port, self._path = parts.hostname, parts.port or 443, parts.path
        self._authority, self._token_file = authority, token_file

    def post(self, body: bytes) -> None:
        """Block, for a few seconds at most; raise NotTaken."""
        try:
            self._post(body)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # of the token's file, too
            raise NotTaken(" ".join(str(error).split()) or type(error).__name__) from error

    def _post(self, body: bytes) -> None:
        headers = {
            "Authorization": f"Bearer {self._token_file.read_text().strip()}",
            "Content-Type": "application/json",
        }
        trusted = ssl.create_default_context(cafile=str(self._authority))
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_SECONDS, context=trusted)
        try:
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            if not 200 <= answer.status < 300:
                said = answer.read(MOST_SHOWN).decode(errors="replace").strip()
                raise NotTaken(f"it answered {answer.status} {answer.reason}{': ' + said if said else ''}")
        finally:
            connection.close()
