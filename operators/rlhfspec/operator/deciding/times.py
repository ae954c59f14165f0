"""Times as Kubernetes writes them.

Example:
    >>> text_of(time_of("2026-01-02T03:04:05Z")), text_of(time_of("2026-01-02T03:04:05.250000Z"))
    ('2026-01-02T03:04:05Z', '2026-01-02T03:04:05.250Z')
"""

from __future__ import annotations

from datetime import UTC, datetime


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def maybe_time_of(text: str | None) -> datetime | None:
    return time_of(text) if text else None


def text_of(time: datetime) -> str:
    """To the millisecond, where there are any."""
    precision = "milliseconds" if time.microsecond >= 1000 else "seconds"
    return time.astimezone(UTC).isoformat(timespec=precision).removesuffix("+00:00") + "Z"


def in_milliseconds(time: datetime) -> datetime:
    """As it reads back from `text_of`."""
    return time.replace(microsecond=time.microsecond // 1000 * 1000)
