"""How much of a step is still to be generated: by generators that say so, and by the samples that no generator has
yet."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlhfspec.messages.records import Load, Sample
from rlhfspec.moves.rebalancing.elastic import StageOutlook
from rlhfspec.moves.rebalancing.fleet import Fleet


class StageWork:
    """samples_per_step: that a step begins with. rows: sequences that one generator runs at once."""

    def __init__(self, *, samples_per_step: int, max_tokens: int, rows: int) -> None:
        self.step = 0
        self._samples_per_step, self._rows = samples_per_step, rows
        self._finished: set[str] = set()
        self._usual_longest = self._longest = max_tokens  # of the step before, and of this one; at first, of any

    def loaded(self, load: Load) -> None:
        if load.step > self.step:
            if self._finished:
                self._usual_longest = self._longest
            self.step, self._finished, self._longest = load.step, set(), 0

    def finished(self, sample: Sample) -> None:
        """A sample that is told of twice counts once."""
        if sample.purpose == "training" and sample.step == self.step:
            self._finished.add(sample.id)
            self._longest = max(self._longest, len(sample.token_ids))

    def num_to_come(self, there: Iterable[str]) -> int:
        """Samples of the step that no generator says that it has: prompts are pulled as there is room."""
        known = self._finished | {id for id in there if id.split("/")[1] == str(self.step)}
        return max(self._samples_per_step - len(known), 0)

    def outlook(self, fleet: Fleet, there: Iterable[str], usual_tokens: float) -> StageOutlook:
        """usual_tokens: expected of a sample that has not begun."""
        num_to_come = self.num_to_come(there)
        begun = self._usual_longest - int(fleet.generated.min(initial=self._usual_longest))
        longest = max(float(fleet.remaining.max(initial=0.0)), float(self._usual_longest if num_to_come else begun))
        return StageOutlook(
            step_seconds=float(np.median(fleet.step_seconds)),
            sequence_seconds=float(np.median(fleet.sequence_seconds)),
            tokens=float(fleet.remaining.sum()) + num_to_come * usual_tokens,
            longest=longest,
            rows=self._rows,
            prefill_seconds=float(fleet.prefill_owed.sum()),
        )
