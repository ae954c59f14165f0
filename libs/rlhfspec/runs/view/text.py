"""Small pieces of text for terminals: escaped samples, sparklines, durations, numbers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
# Controls, formatting (may reverse a line), lone surrogates, private and unassigned characters, and Unicode line ends.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """Return text with every terminal control character made visible, except line ends."""
    return "".join(character if _is_safe(character) else _picture(character) for character in text)


def one_line(text: str) -> str:
    return visible(text).strip("\n").replace("\n", " ↵ ")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as a sparkline of at most `width` means; equal values are drawn low."""
    columns = _columns(values, width)
    if not columns:
        return ""
    low, high = min(columns), max(columns)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in columns)


def histogram(counts: Sequence[int]) -> str:
    """Return one bar character per count, scaled to the largest; only empty bins are blank."""
    most = max(counts, default=0)
    return "".join(_BARS[round((count / most) * (len(_BARS) - 1))] if count else " " for count in counts)


def bar(fraction: float, width: int) -> str:
    full = round(min(1.0, max(0.0, fraction)) * width)
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """Return a duration in short form.

    >>> duration(4.21), duration(192.4), duration(7300)
    ('4.2s', '3m12s', '2h01m')
    """
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def number(value: float | None) -> str:
    """Return three significant digits, so that columns align; "-" for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.1e}" if not 1e-4 <= abs(value) < 1e9 else f"{value:#.3g}".rstrip(".")


def size(num_bytes: float) -> str:
    """Return a size in kB or MB.

    >>> size(800), size(26_112), size(1_234_567)
    ('0.8 kB', '26.1 kB', '1.2 MB')
    """
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"


def estimates(kl: Mapping[str, float]) -> str:
    """Return all KL estimates in one line.

    >>> estimates({"k1": -0.00125, "k3": 0.0005})
    'k1 -0.00125, k3 0.000500'
    """
    return ", ".join(f"{name} {number(value)}" for name, value in kl.items())


def shares(values: Iterable[float]) -> str:
    """Format shares.

    >>> shares([0.954, 1.0])
    '.95 1.00'
    """
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def signed(value: float) -> str:
    """Return the number with its sign.

    >>> signed(0.3), signed(-0.25), signed(0.0)
    ('+0.300', '-0.250', '+0')
    """
    return ("-" if value < 0 else "+") + number(abs(value))


def _columns(values: Sequence[float], width: int) -> list[float]:
    num_columns = min(width, len(values))
    bounds = [place * len(values) // num_columns for place in range(num_columns + 1)] if num_columns > 0 else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]


def _is_safe(character: str) -> bool:
    return character == "\n" or unicodedata.category(character) not in _UNSAFE


def _picture(character: str) -> str:
    code = ord(character)
    if character == "\t":
        return "    "
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
