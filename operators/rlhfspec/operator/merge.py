"""A pod with a user's additions, as `kubectl patch` merges: blocks key by key, named things by their name, the rest of
lists at the end; null removes.

Example:
    >>> merged({"env": [{"name": "A", "value": "1"}], "x": 1}, {"env": [{"name": "A", "value": "2"}], "x": None})
    {'env': [{'name': 'A', 'value': '2'}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# By what the things in a list are told apart; `name` where nothing is said.
KEYS = {"volumeMounts": "mountPath", "ports": "containerPort", "imagePullSecrets": "name", "hostAliases": "ip"}


def merged(base: Mapping[Any, Any], change: Mapping[Any, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = merged(result[name], value)
        elif _is_list(value) and _is_list(result.get(name)):
            result[name] = _merged_lists(result[name], value, KEYS.get(name, "name"))
        else:
            result[name] = value
    return result


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _merged_lists(base: Sequence[Any], change: Sequence[Any], key: str) -> list[Any]:
    """Text, such as a command, is replaced as a whole; blocks without the key, such as tolerations, are added."""
    if not all(isinstance(item, Mapping) for item in (*base, *change)):
        return list(change)
    result = list(base)
    for item in change:
        index = next((i for i, each in enumerate(base) if key in item and each.get(key) == item[key]), None)
        if index is not None:
            result[index] = merged(result[index], item)
        elif item not in result:
            result.append(item)
    return result
