"""Rewards from an HTTP endpoint (docs/rewards.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from rlhfspec.job.file.secrets import HIDDEN, secrets_of
from rlhfspec.messages.records import Sample
from rlhfspec.training.scoring.rewards.base import Around, CallFailed, Reward, columns_of, number

MAX_REPLY_BYTES = 1 << 20
# Client errors that are retried.
TEMPORARY_STATUS = frozenset({408, 425, 429})
for _name in ("httpx", "httpcore"):  # they log URLs and headers
    logging.getLogger(_name).setLevel(logging.WARNING)


class HttpRewards:
    """Source that sends one POST per sample over at most `concurrency` connections."""

    grouped = False

    def __init__(self, url: str, headers: Mapping[str, str], *, concurrency: int) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/json"}
        self._secrets = secrets_of(url, list(headers.values()))
        self._limits = httpx.Limits(max_connections=concurrency)
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        self._connected()

    async def rewards(self, samples: Sequence[Sample], around: Around = nullcontext) -> list[Reward]:
        (sample,) = samples
        try:
            with around():
                return [_reward(await self._post(_request(sample)))]
        except CallFailed as failure:
            raise self._without_secrets(failure) from None
        except httpx.DecodingError as error:
            raise CallFailed(f"the reply cannot be decoded: {error}", temporary=False, cause=error) from error
        except httpx.TransportError as error:
            detail = str(error) or type(error).__name__
            raise CallFailed(f"the connection failed: {detail}", temporary=True, cause=error) from error

    def _without_secrets(self, failure: CallFailed) -> CallFailed:
        """Remove secrets from a failure's message, since endpoints may echo requests."""
        problem = failure.problem
        for secret in self._secrets:
            problem = problem.replace(secret, HIDDEN)
        return CallFailed(problem, temporary=failure.temporary, wait_seconds=failure.wait_seconds)

    async def _post(self, body: bytes) -> bytes:
        client = self._connected()
        async with client.stream("POST", self._url, content=body, headers=self._headers) as reply:
            content = bytearray()
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise CallFailed(f"the reply is longer than {MAX_REPLY_BYTES} bytes", temporary=False)
            if not reply.is_success:
                raise _refused(reply, bytes(content))
        return bytes(content)

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            # The caller sets one deadline for the whole call; a timeout per read would let a slow trickle pass.
            self._client = httpx.AsyncClient(timeout=None, limits=self._limits)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _request(sample: Sample) -> bytes:
    body = {
        "id": sample.id,
        "prompt": sample.prompt_text,
        "completion": sample.text,
        "finish_reason": sample.finish_reason,
        "columns": columns_of(sample),
    }
    return json.dumps(body).encode()


def _reward(content: bytes) -> float:
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the reply is not JSON: {_excerpt(content)}", temporary=False, cause=error) from error
    if not isinstance(reply, dict) or "reward" not in reply:
        raise CallFailed(f'the reply has no "reward": {_excerpt(content)}', temporary=False)
    return number(reply["reward"], 'the reply\'s "reward"')


def _refused(reply: httpx.Response, content: bytes) -> CallFailed:
    temporary = reply.status_code >= 500 or reply.status_code in TEMPORARY_STATUS
    wait_seconds = retry_after_seconds(reply.headers.get("retry-after"), datetime.now(UTC)) if temporary else 0.0
    problem = f"the endpoint answered {reply.status_code} {reply.reason_phrase}: {_excerpt(content)}"
    return CallFailed(problem, temporary=temporary, wait_seconds=wait_seconds)


def retry_after_seconds(header: str | None, now: datetime) -> float:
    """Return the delay of a Retry-After header (seconds or a date), or 0 if absent or unreadable.

    >>> noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    >>> retry_after_seconds("3", noon), retry_after_seconds("Tue, 01 Jan 2030 12:00:10 GMT", noon)
    (3.0, 10.0)
    """
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - now).total_seconds())
    except (ValueError, TypeError):  # unreadable, or without a time zone
        return 0.0


def _excerpt(content: bytes) -> str:
    text = repr(content.decode("utf-8", "replace"))
    return text if len(text) <= 120 else f"{text[:117]}..."
