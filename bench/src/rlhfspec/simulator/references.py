"""References for planners: seconds of a stage planned with true lengths, and of ideally shared work.

Example:
    >>> from rlhfspec.simulator.simulator import PRESETS, Scenario, simulate, workload
    >>> scenario = Scenario(num_generators=4, curve=PRESETS["t0=2.5c"])
    >>> work = workload("groups", num_generators=4, per_generator=32, seed=1)
    >>> clairvoyant_seconds(scenario, work) < ideal_sharing_seconds(scenario, work) < simulate(scenario, work).seconds
    True
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.policies import policy_named
from rlhfspec.simulator.scenario import Scenario
from rlhfspec.simulator.simulator import simulate

_MOST_CELLS = 300_000_000  # generators x sequences of a clairvoyant
_MOST_EXCHANGES = 2_000


def ideal_sharing_seconds(scenario: Scenario, work: Workload) -> float:
    """Return the seconds with sequences spread evenly over all generators at every token.

    This sums, over token index e, the seconds of a step with ceil(alive(e) / N) sequences, plus an equal share of the
    prefill. Returns nan if rows are too few for all or generators differ in speed.
    """
    count = scenario.num_generators
    if work.num_sequences > count * scenario.rows or scenario.slowness:
        return float("nan")
    alive = np.bincount(work.lengths)[::-1].cumsum()[::-1][1:]  # alive[e - 1]: those that make an e-th token
    shared = -(-alive // count)
    share = 1.0 if scenario.engines_per_host > 1 else 0.0
    steps = scenario.curve.table(int(shared.max()), busy_share=share)[shared].sum()
    return float(steps + _prompt_tokens(scenario, work) * scenario.prefill_seconds / count)


def _prompt_tokens(scenario: Scenario, work: Workload) -> int:
    if not scenario.shares_prefixes:
        return int(work.prompt_tokens.sum())
    pairs = work.dealt * (int(work.prompts.max()) + 1) + work.prompts
    return int(work.prompt_tokens[np.unique(pairs, return_index=True)[1]].sum())


def clairvoyant_seconds(scenario: Scenario, work: Workload) -> float:
    """Return the seconds of the best schedule found with all lengths known, or nan if the stage is too large.

    Candidates are simulated: `assign` on one and on all engines per host, pulling longest first, and `plan()` with
    true lengths. The fastest is an upper bound of the optimum.
    """
    if scenario.num_generators * work.num_sequences > _MOST_CELLS:
        return float("nan")
    peaceful = replace(scenario, kills=(), pulls=False)
    order = np.argsort(-work.lengths, kind="stable")
    found = []
    for used in sorted({1, scenario.engines_per_host}) if scenario.engines_per_host > 1 else [1]:
        dealt = assign(peaceful, work, engines_used=used)
        found.append(simulate(peaceful, replace(work, dealt=dealt), order=order).seconds)
    found.append(simulate(replace(peaceful, pulls=True), work, order=order).seconds)
    for start in (work, replace(work, dealt=dealt)):  # moving KV may be cheaper than a second prefill
        found.append(simulate(peaceful, start, policy_named("ours-knowing", start)).seconds)
    return min(found)


def assign(scenario: Scenario, work: Workload, *, engines_used: int) -> Ints:
    """Return [S]: the generator of each sequence, chosen with all lengths known, on `engines_used` engines per host."""
    busy = 1.0 if scenario.engines_per_host > 1 and engines_used > 1 else 0.0
    per_generator = -(-work.num_sequences // scenario.num_generators)
    t0, c = scenario.curve.fitted(max(min(2 * per_generator, scenario.rows), 2), busy_share=busy)
    slow = np.ones(scenario.num_generators)
    for generator, factor in scenario.slowness:
        slow[generator] = factor
    usable = np.arange(scenario.num_generators)
    if scenario.engines_per_host > 1:
        usable = usable[usable % scenario.engines_per_host < engines_used]
    table = _Assignment(scenario, work, t0 * slow[usable], c * slow[usable])
    table.longest_first()
    table.exchange()
    return np.asarray(usable[table.place])


class _Assignment:
    """Assignment of sequences to generators; each ends at t0 * longest length + c * sum of lengths + prefill."""

    def __init__(self, scenario: Scenario, work: Workload, t0: Floats, c: Floats) -> None:
        self.scenario, self.work, self.t0, self.c = scenario, work, t0, c
        self.longest, self.total, self.prefill = np.zeros(len(t0)), np.zeros(len(t0)), np.zeros(len(t0))
        self.has = np.zeros((len(t0), int(work.prompts.max()) + 1), dtype=np.int32)  # samples of each prompt
        self.place = np.full(work.num_sequences, -1)

    def ends(self) -> Floats:
        return np.asarray(self.t0 * self.longest + self.c * self.total + self.prefill)

    def longest_first(self) -> None:
        for sequence in np.argsort(-self.work.lengths, kind="stable").tolist():
            self._put(sequence, int(np.argmin(self._ends_with(sequence))))

    def _ends_with(self, sequence: int) -> Floats:
        length = self.work.lengths[sequence]
        longest = np.maximum(self.longest, length)
        return np.asarray(self.t0 * longest + self.c * (self.total + length) + self.prefill + self._prompt(sequence))

    def _prompt(self, sequence: int) -> Floats:
        """Return [N]: the prefill seconds that the sequence would add to each generator."""
        is_new = self.has[:, self.work.prompts[sequence]] == 0
        seconds = self.work.prompt_tokens[sequence] * self.scenario.prefill_seconds
        return np.asarray(is_new * seconds if self.scenario.shares_prefixes else np.full(len(self.t0), seconds))

    def _put(self, sequence: int, place: int) -> None:
        self.prefill[place] += self._prompt(sequence)[place]
        self.has[place, self.work.prompts[sequence]] += 1
        self.longest[place] = max(self.longest[place], self.work.lengths[sequence])
        self.total[place] += self.work.lengths[sequence]
        self.place[sequence] = place

    def _take(self, sequence: int) -> None:
        place, prompt = self.place[sequence], self.work.prompts[sequence]
        self.has[place, prompt] -= 1
        self.prefill[place] -= self._prompt(sequence)[place]
        self.total[place] -= self.work.lengths[sequence]
        self.place[sequence] = -1
        here = self.work.lengths[self.place == place]
        self.longest[place] = here.max(initial=0)

    def exchange(self) -> None:
        """Move sequences off the generator that ends last while that helps."""
        for _ in range(_MOST_EXCHANGES):
            ends = self.ends()
            latest = int(np.argmax(ends))
            if not self._improve(latest, float(ends[latest])):
                return

    def _improve(self, latest: int, end: float) -> bool:
        members = np.flatnonzero(self.place == latest)
        for sequence in members[np.argsort(self.work.lengths[members], kind="stable")].tolist():
            self._take(sequence)
            with_it = self._ends_with(sequence)
            with_it[latest] = np.inf
            best = int(np.argmin(with_it))
            if max(with_it[best], self.ends()[latest]) < end - 1e-9:
                self._put(sequence, best)
                return True
            self._put(sequence, latest)
        return False
