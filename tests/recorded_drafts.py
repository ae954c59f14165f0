"""Record of what drafters draft, to compare with slow twins."""

from typing import Any

import pytest

from rlhfspec.engine.drafting.base import DraftBatch, Forest
from rlhfspec.engine.drafting.model import ModelDrafter

Drafted = list[tuple[list[int], list[int]]]  # text, and the chain behind it


def recorded(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Return a list that receives what chains draft from now on."""
    found: Drafted = []
    genuine = ModelDrafter.propose

    def propose(self: ModelDrafter, batch: DraftBatch, *rest: Any) -> Forest:
        forest = genuine(self, batch, *rest)
        for index, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            chain = forest.token[forest.sequence == index].tolist()
            found.append((batch.tokens[row, :length].tolist(), chain))
        return forest

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    return found
