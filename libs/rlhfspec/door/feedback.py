"""Votes of people on a door's answers."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from rlhfspec.door.answers import Response
from rlhfspec.door.bodies import Body
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest
from rlhfspec.runs.folder.run_folder import RunFolder

_MOST_ANSWERS = 256  # that can still be voted on; the oldest are forgotten first


class Vote(Body):
    id: str  # of an answer
    vote: Literal["up", "down"]
    against: str | None = None  # the answer that it was compared with


class Feedback:
    """Memory of a door's latest chat answers; a vote on one is appended to the run's `feedback.jsonl`."""

    def __init__(self, run: RunFolder, name: str) -> None:
        """Create the memory. `name`: that of the policy in the file."""
        self._run = run
        self._name = name
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def remember(self, id: str, messages: Sequence[Any], params: SamplingParams, response: Response) -> None:
        told = asdict(response)
        for name in ("index", "top_log_probs", "text", "calls"):
            del told[name]
        said = {"messages": messages, "answer": response.message}
        self._answers[id] = {"policy": self._name, **said, **told, "params": asdict(params)}
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.popitem(last=False)

    def vote(self, vote: Vote) -> None:
        """Append the answer and its vote. A later vote on the same answer is one more line."""
        if vote.id not in self._answers:
            raise InvalidRequest("id", vote.id, f"is not among the last {_MOST_ANSWERS} answers")
        given = {"id": vote.id, "vote": vote.vote, "against": vote.against, "unix_time": round(time.time(), 3)}
        self._run.append_feedback(json.dumps(given | self._answers[vote.id]) + "\n")
