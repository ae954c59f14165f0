"""A status in one form: server-side apply leaves null, or nothing, where a map or list became empty.

Example:
    >>> tidy({"byWorker": None, "memory": {"workers": {}}, "step": 0, "reason": ""})
    {'step': 0, 'reason': ''}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tidy(fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: tidy(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return {name: value for name, value in kept.items() if value is not None and value != {} and value != []}
