"""Kubernetes' amounts, such as `3500m` CPUs or `1k` GPUs, as numbers.

Example:
    >>> [float(amount(text)) for text in (8, "3500m", "1k", "2Gi", "1e0")]
    [8.0, 3.5, 1000.0, 2147483648.0, 1.0]
    >>> amount("many")
    Decimal('0')
"""

from __future__ import annotations

import re
from decimal import Decimal

_PARTS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i))?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def amount(said: int | str | None) -> Decimal:
    """0 where nothing is said, or what the API server will refuse."""
    found = _PARTS.fullmatch(str(said))
    if found is None:
        return Decimal(0)
    number, exponent, suffix = found.groups()
    if suffix and suffix.endswith("i"):
        return Decimal(number) * Decimal(1024) ** ("KMGTPE".index(suffix[0]) + 1)
    return Decimal(number).scaleb(int(exponent or _DECIMAL.get(suffix or "", 0)))
