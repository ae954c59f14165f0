"""Worker protocol: one line of JSON in, one line out. Standard library only.

A worker sleeps in `readline` between requests, so an idle one uses no CPU. Output of libraries goes to standard
error; only replies travel on the pipe.

    {"load": {...}}                          -> {"loaded": {...}}
    {"run": {"prompts": [[1, 2]], ...}}      -> {"seconds": 1.2, "num_tokens": 128, ...}
    {"quit": {}}                             -> the process ends
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handlers: dict[str, Handler]) -> None:
    """Serve requests until standard input ends or `quit` arrives; the reply to a failed request is its error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        [(name, arguments)] = json.loads(line).items()
        if name == "quit":
            break
        try:
            answer = handlers[name](arguments)
        except Exception as error:  # process boundary: the caller reports the error
            traceback.print_exc(file=sys.stderr)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
