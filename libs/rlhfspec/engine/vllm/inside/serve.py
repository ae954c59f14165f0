"""Server of vLLM over a pipe: JSON lines in; two lengths, JSON and arrays out. Run as a file by vLLM's Python.

    {"open": {...}}                              -> the engine's properties
    {"begin": {"weights": path or null}}         -> gauges, after aborting all sequences and loading the weights
    {"load": {"weights": path}}                  -> gauges; sequences continue under these weights
    {"step": {"add": [...], "cancel": [...], "ahead_seconds": 0.01}}  -> new tokens and gauges

A failure within vLLM is reported and ends the process. Spawned ranks run the top of this file again.
"""

from __future__ import annotations

import json
import os
import sys
import types

if "rlhfspec" not in sys.modules:  # find only this package, not what is installed beside it
    _ours = types.ModuleType("rlhfspec")
    _ours.__path__ = os.environ["RLHFSPEC_VLLM_CODE"].split(os.pathsep)
    sys.modules["rlhfspec"] = _ours


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from rlhfspec.engine.vllm import LENGTHS
    from rlhfspec.engine.vllm.inside.host import ChildRefused, Host, in_one_line

    host = Host()
    for line in sys.stdin:
        [(name, arguments)] = json.loads(line).items()
        try:
            answer, is_over = getattr(host, name)(**arguments), False
        except ChildRefused as error:
            answer, is_over = {"refused": str(error), "field": error.field}, True
        except Exception as error:  # the process boundary: the other side reports the failure
            answer, is_over = {"failed": in_one_line(error)}, True
        arrays, words = answer.pop("arrays", b""), json.dumps(answer).encode()
        answers.write(LENGTHS.pack(len(words), len(arrays)) + words + arrays)
        answers.flush()
        if is_over:
            os._exit(1)  # libraries may hold threads that never end
    os._exit(0)


if __name__ == "__main__":
    main()
