"""Reports of a run to the operator. A silent operator is tolerated."""

from __future__ import annotations

import http.client
import logging
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rlhfspec.cluster.report import AT_LEAST_SECONDS, Report
from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.base import Service
from rlhfspec.stage.vitals import Vitals

_REPORT_CHECK_SECONDS = 0.25
AT_MOST_EVERY_SECONDS = 1.0
LONGEST_REPORT_WAIT_SECONDS = 10.0  # longest backoff after failed reports
_REPORT_DEADLINE_SECONDS = 60.0
TIMEOUT_SECONDS = 5.0
MOST_SHOWN = 200  # bytes of an answer
log = logging.getLogger("rlhfspec.stage")


class NotTaken(Exception):
    """Raised when the operator does not receive or refuses a report."""


class Endpoint:
    """Endpoint of the operator: JSON over TLS with the pod's service account token, without redirects.

    Token and connection are new for every report, because tokens expire and the leader may change.
    """

    def __init__(self, url: str, authority: Path, token_file: Path) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname is None:
            raise InvalidRequest("report_url", url, "must be an https:// URL, because a token is sent to it")
        self._host, self._port, self._path = parts.hostname, parts.port or 443, parts.path
        self._authority, self._token_file = authority, token_file

    def post(self, body: bytes) -> None:
        """Send a report within a few seconds. Raise NotTaken on failure."""
        try:
            self._post(body)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # also from reading the token
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


def news(report: Report) -> tuple[object, ...]:
    return report.step, report.total_steps, report.checkpoint_step, report.generators_wanted, report.troubles


class Turn:
    """Schedule of reports: soon with news, else seldom, with randomized retries.

    >>> turn, quiet = Turn(random.Random(0)), Report(run="3f2a")
    >>> turn.is_due(quiet, now=0.0)
    True
    >>> turn.was_taken(quiet, now=0.0)
    >>> step = quiet.model_copy(update={"step": 1})
    >>> turn.is_due(quiet, now=5.0), turn.is_due(step, now=0.5), turn.is_due(step, now=1.0), turn.is_due(quiet, 20.0)
    (False, False, True, True)
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._told: tuple[object, ...] | None = None
        self._not_before = self._at_latest = -float("inf")
        self._num_failures = 0

    def is_due(self, report: Report, now: float) -> bool:
        return now >= self._not_before and (now >= self._at_latest or news(report) != self._told)

    def was_taken(self, report: Report, now: float) -> None:
        self._told, self._num_failures = news(report), 0
        self._not_before, self._at_latest = now + AT_MOST_EVERY_SECONDS, now + AT_LEAST_SECONDS

    def was_not_taken(self, now: float) -> bool:
        """Record a failure and return whether it is the first in a row."""
        self._num_failures += 1
        wait = min(AT_MOST_EVERY_SECONDS * 2.0 ** min(self._num_failures - 1, 10), LONGEST_REPORT_WAIT_SECONDS)
        self._not_before = self._at_latest = now + wait * self._draw.uniform(0.5, 1.0)
        return self._num_failures == 1


class Reporter(Service):
    """Report sender. consumes: RunKnowledge; produces: reports; waits for: news; unblocked by: every stage, time."""

    def __init__(
        self, vitals: Vitals, look: Callable[[], Report], post: Callable[[bytes], None], draw: random.Random
    ) -> None:
        super().__init__("reporter", 0, vitals)
        self._clock: Clock = vitals.clock
        self._look, self._post = look, post
        self._turn = Turn(draw)
        self._is_away = False

    async def run(self) -> None:
        while not self.stopping.is_set():
            report = self._look()
            if self._turn.is_due(report, self._clock.now()):
                await self._tell(report)
            await self.pause("something to report", _REPORT_CHECK_SECONDS)

    async def _tell(self, report: Report) -> None:
        try:
            with self.vitals.working("sending a report to the operator", deadline_seconds=_REPORT_DEADLINE_SECONDS):
                await self.in_thread(self._post, report.model_dump_json(exclude_defaults=True).encode())
        except NotTaken as error:
            if self._turn.was_not_taken(self._clock.now()):
                log.warning("the operator does not accept reports: %s; the run continues without", error)
            self._is_away = True
            return
        self._turn.was_taken(report, self._clock.now())
        if self._is_away:
            self._is_away = False
            log.info("the operator accepts reports again")
