"""Tool calls in responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlhfspec.errors import InvalidRequest


def check_parser(name: str) -> None:
    """Raise InvalidRequest if there is no parser of this name."""
    from renderers.parsers import TOOL_PARSERS

    if name not in TOOL_PARSERS:
        raise InvalidRequest("--tool-parser", name, f"must be among {', '.join(TOOL_PARSERS)}")


class ToolCalls:
    """Reader of one format of tool calls, by a parser of the package `renderers`."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from renderers.parsers import get_tool_parser

        check_parser(name)
        self._tokenizer = tokenizer
        self._parser = get_tool_parser(name, tokenizer)

    def read(self, token_ids: Sequence[int], name: str) -> tuple[str, list[dict[str, Any]]] | None:
        """Return a response's text and its calls, whose ids begin with `name`; None if one of them is malformed."""
        rest, found = self._parser.extract(list(token_ids))
        if any(each.status != "ok" for each in found):
            return None
        calls = [
            {"id": f"{name}-{index}", "type": "function", "function": {"name": each.name, "arguments": _json(each)}}
            for index, each in enumerate(found)
        ]
        return str(self._tokenizer.decode(rest, skip_special_tokens=True)).strip(), calls


def _json(call: Any) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
