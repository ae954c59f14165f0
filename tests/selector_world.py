"""Simulated machine and drafter for selector tests. Time is simulated (`World.now`). Example:

>>> from rlhfspec.engine.drafting.fixed import FixedSelector
>>> from rlhfspec.engine.drafting.outlook import default_plans
>>> from rlhfspec.engine.drafting.selector import AdaptiveSelector
>>> world = World(machine=FLAT_TO_16, agreement={"model": 0.5}, seed=1)
>>> costs, acceptance = world.profiled(), AcceptanceModel(num_rows=8)
>>> adaptive = AdaptiveSelector(costs, acceptance, default_plans(("model",)))
>>> fast = world.run(adaptive, acceptance, num_sequences=8, num_steps=30)
>>> plain = world.run(FixedSelector(base.PLAIN), acceptance, num_sequences=8, num_steps=30)
>>> fast.tokens_per_second > 1.3 * plain.tokens_per_second
True
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import BoolArray, FloatArray, IntArray
from rlhfspec.engine.drafting import base
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.cost import TARGET, CostModel
from rlhfspec.job.choices.drafters import DRAFTERS

_PROMPT = 100  # tokens
_SHARES = np.array([0.75, 0.45, 0.3])  # ranks 1, 2, 3: of what rank 0 leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """Seconds of every operation, as a function of rows."""

    target: Callable[[float], float]
    draft_level: Callable[[float], float]
    draft_first: Callable[[float], float]
    host_plain: float = 3e-4
    host_draft: float = 7e-4

    def seconds(self, kind: str, rows: float) -> float:
        if kind == TARGET:
            return self.target(rows)
        if kind.startswith("host:"):
            return self.host_plain if kind == "host:plain" else self.host_draft
        if not DRAFTERS[kind.rpartition(":")[2]].runs_draft_model:
            return 1e-4 + 2e-5 * rows
        return self.draft_first(rows) if kind.startswith("draft-first:") else self.draft_level(rows)


FLAT_TO_16 = SimulatedMachine(  # bound by memory: rows are free until arithmetic takes over
    target=lambda rows: 6e-3 + 3.5e-4 * max(rows - 16.0, 0.0),
    draft_level=lambda rows: 5e-4 + 4e-6 * rows,
    draft_first=lambda rows: 6e-4 + 8e-6 * rows,
)
EVERY_ROW_COSTS = SimulatedMachine(
    target=lambda rows: 8e-3 + 1.1e-3 * rows,
    draft_level=lambda rows: 4e-4 + 1.5e-5 * rows,
    draft_first=lambda rows: 5e-4 + 3e-5 * rows,
)


CHEAP_LEVELS = SimulatedMachine(  # the tiny 77M pair on one core of a server, levels in one native call
    target=lambda rows: 1.2e-2 + 1.7e-4 * max(rows - 24.0, 0.0),
    draft_level=lambda rows: 4e-5 + 5e-6 * rows,
    draft_first=lambda rows: 4e-4 + 1.2e-5 * rows,
    host_plain=8e-4,
    host_draft=1.3e-3,
)


@dataclass(slots=True)
class SimulatedRun:
    num_tokens: int = 0
    seconds: float = 0.0
    plans: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


class World:
    """World. `agreement`: per drafter, a shift of the log-odds of acceptance (0 middling, -8 useless, 2 excellent).

    `spread`: difference between sequences. `noise`: relative noise of times. `outliers`: share of steps that take 10x.
    """

    def __init__(
        self,
        *,
        machine: SimulatedMachine,
        agreement: dict[str, float],
        seed: int = 0,
        spread: float = 0.5,
        noise: float = 0.03,
        outliers: float = 0.0,
    ) -> None:
        self.machine = machine
        self.agreement = agreement
        self.now = 0.0
        self._random = np.random.default_rng(seed)
        self._spread = spread
        self._noise = noise
        self._outliers = outliers
        self._shift = self._random.normal(0.0, spread, 512)  # per table row
        self._unseen = np.full(512, _PROMPT, np.int32)  # tokens of the row that a draft model has yet to run

    def profiled(self) -> CostModel:
        return CostModel.profile(
            lambda kind, rows, kv_tokens: self._jittered(self.machine.seconds(kind, rows), outliers=0.0),
            drafters=tuple(name for name in self.agreement if DRAFTERS[name].runs_draft_model),
        )

    def run(
        self,
        selector: base.Selector,
        acceptance: AcceptanceModel,
        *,
        num_sequences: int,
        num_steps: int,
        finish: bool = False,
    ) -> SimulatedRun:
        """Run steps at a constant batch. `finish`: afterwards new sequences take the rows."""
        run = SimulatedRun()
        for _ in range(num_steps):
            self.step(selector, acceptance, np.arange(num_sequences, dtype=np.int32), run)
        if finish:
            for row in range(num_sequences):
                self.renew(row, acceptance)
        return run

    def drain(
        self, selector: base.Selector, acceptance: AcceptanceModel, *, num_sequences: int, num_tokens: int
    ) -> SimulatedRun:
        """Run sequences that start together to `num_tokens` each, without replacement."""
        run, room = SimulatedRun(), np.full(num_sequences, num_tokens, np.int32)
        while room.any():
            rows = np.flatnonzero(room).astype(np.int32)
            outcome = self.step(selector, acceptance, rows, run, room=room[rows])
            accepted = np.bincount(outcome.forest.sequence[outcome.accepted], minlength=len(rows))
            room[rows] = np.maximum(room[rows] - 1 - accepted, 0)
        run.num_tokens = num_sequences * num_tokens  # not what was drafted beyond the end
        for row in range(num_sequences):
            self.renew(row, acceptance)
        return run

    def renew(self, row: int, acceptance: AcceptanceModel) -> None:
        acceptance.forget(row)
        self._unseen[row] = _PROMPT
        self._shift[row] = self._random.normal(0.0, self._spread)

    def step(
        self,
        selector: base.Selector,
        acceptance: AcceptanceModel,
        rows: IntArray,
        run: SimulatedRun,
        *,
        room: IntArray | None = None,
    ) -> base.DraftOutcome:
        """Run a step. `room`: tokens that each sequence may still generate; None: no limit."""
        room = np.full(len(rows), 10_000, np.int32) if room is None else room
        state = base.BatchState(
            rows=rows, room=room, num_prefill_rows=0, kv_tokens=_PROMPT * len(rows), unseen=self._unseen[rows]
        )
        started = self.now
        plan = selector.plan(state)
        proposed, winner = base.empty_forest(), np.zeros(len(rows), np.int64)
        if plan.drafter is not None:
            proposed, winner = self._propose(plan, state, acceptance, selector.rule(plan, state))
        draft_seconds = self.now - started
        choice = selector.budget(plan, state, proposed, draft_seconds)
        forest = proposed.take(choice.keep)
        verify_seconds = self._spend(TARGET, len(rows) + forest.size)
        self._spend("host:plain" if plan.drafter is None else f"host:{plan.drafter}", len(rows))
        num_drafted = len(rows) if plan.num_sequences is None else plan.num_sequences
        reached, accepted = _walk(forest, winner, choice.keep, num_drafted)
        self._unseen[rows] += 1  # what is accepted, the drafter has seen
        took = {"draft_seconds": draft_seconds, "verify_seconds": verify_seconds, "step_seconds": self.now - started}
        counts = {"num_committed": len(rows) + int(accepted.sum()), "num_proposed": proposed.size}
        verified = {"forest": forest, "reached": reached, "accepted": accepted, "choice": choice}
        outcome = base.DraftOutcome(plan=plan, state=state, **verified, **counts, **took)
        selector.observe(outcome)
        run.num_tokens += outcome.num_committed
        run.seconds += outcome.step_seconds
        run.plans[plan.name] += 1
        return outcome

    def _propose(
        self, plan: base.DraftPlan, state: base.BatchState, acceptance: AcceptanceModel, rule: base.LevelRule
    ) -> tuple[base.Forest, npt.NDArray[np.int64]]:
        """Return a forest, and for each sequence and node the rank of the target's choice below it (9: none)."""
        name, table_rows = str(plan.drafter), state.rows[: plan.num_sequences]
        num_sequences = len(table_rows)
        winner, gaps = self._children(name, table_rows, plan.branch)
        runs_model = DRAFTERS[name].runs_draft_model
        self._spend(f"draft-first:{name}", num_sequences + (int(self._unseen[table_rows].sum()) if runs_model else 0))
        if runs_model:
            self._unseen[table_rows] = -1  # what is accepted it has run; of this step the next token is new
        roots = np.full(num_sequences, -1, np.int32)
        whole = np.ones(num_sequences, np.float32)
        levels = [self._level(acceptance, table_rows, plan, 1, np.arange(num_sequences), roots, whole, gaps)]
        winners = [winner]
        start = 0  # index of the last level's first node
        for level in range(2, plan.depth + 1):
            last = levels[-1]
            best = np.sort(np.argsort(-last.path_acceptance, kind="stable")[: plan.width * num_sequences])
            path = last.path_acceptance[best]
            if DRAFTERS[name].runs_draft_model:
                if not rule.go_on(frontier_acceptance=path, num_rows=len(best), level=level):
                    break
                self._spend(f"draft:{name}", len(best))
            winner, gaps = self._children(name, table_rows[last.sequence[best]], plan.branch)
            winners.append(np.full(last.size, 9))
            winners[-1][best] = winner
            parents = (best + start).astype(np.int32)
            start += last.size
            levels.append(self._level(acceptance, table_rows, plan, level, last.sequence[best], parents, path, gaps))
        winners.append(np.full(levels[-1].size, 9))
        names = ("sequence", "parent", "depth", "token", "rank", "gap", "path_acceptance")
        forest = base.Forest(**{n: np.concatenate([getattr(level, n) for level in levels]) for n in names})
        return forest, np.concatenate(winners)

    def _children(self, name: str, rows: IntArray, branch: int) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Return for n parents the rank of the target's choice, [n], and the candidates' gaps, [n, branch]."""
        n = len(rows)
        lead = self._random.exponential(3.0, n)
        behind = lead[:, None] + np.cumsum(self._random.exponential(1.0, (n, 3)), axis=1)
        behind[:, 0] = lead
        log_odds = np.log(np.expm1(0.75 * lead + 0.66) + 1e-9) + self.agreement[name] + self._shift[rows]
        best = 1.0 / (1.0 + np.exp(-log_odds))
        chances = np.concatenate((best[:, None], (1.0 - best)[:, None] * _SHARES * np.exp(-0.3 * behind)), axis=1)
        winner = (self._random.random((n, 1)) > np.cumsum(chances, axis=1)).sum(axis=1)
        gaps = np.concatenate((lead[:, None], behind), axis=1)[:, :branch].astype(np.float32)
        return np.where(winner < branch, winner, 9), gaps

    @staticmethod
    def _level(
        acceptance: AcceptanceModel,
        rows: IntArray,
        plan: base.DraftPlan,
        level: int,
        sequences: npt.NDArray[np.integer],
        parents: IntArray,
        path: FloatArray,
        gaps: FloatArray,
    ) -> base.Forest:
        """Return `plan.branch` children for each of n parents, given sequences and path acceptances, [n]."""
        n, branch = len(parents), plan.branch
        sequence = np.repeat(sequences, branch).astype(np.int32)
        rank = np.tile(np.arange(branch, dtype=np.int32), n)
        depth = np.full(n * branch, level, np.int32)
        conditional = acceptance.predict(str(plan.drafter), rows[sequence], depth, rank, gaps.ravel())
        paths, parent = np.repeat(path, branch) * conditional, np.repeat(parents, branch)
        grown = {"sequence": sequence, "parent": parent, "depth": depth, "path_acceptance": paths}
        return base.Forest(token=rank, rank=rank, gap=gaps.ravel(), **grown)

    def _spend(self, kind: str, rows: int) -> float:
        seconds = self._jittered(self.machine.seconds(kind, rows), outliers=self._outliers)
        self.now += seconds
        return seconds

    def _jittered(self, seconds: float, *, outliers: float) -> float:
        slow = 10.0 if outliers and self._random.random() < outliers else 1.0
        return seconds * slow * float(np.exp(abs(self._random.normal(0.0, self._noise))))


def _walk(
    forest: base.Forest, winner: npt.NDArray[np.int64], keep: IntArray, num_sequences: int
) -> tuple[BoolArray, BoolArray]:
    """Return reached, accepted [N]. `winner` is indexed by sequence, then by node of the forest as proposed."""
    reached, accepted = np.zeros(forest.size, np.bool_), np.zeros(forest.size, np.bool_)
    for level in range(1, int(forest.depth.max()) + 1 if forest.size else 1):
        nodes = np.flatnonzero(forest.depth == level)
        parent = forest.parent[nodes]
        alive = (parent < 0) | accepted[parent]
        nodes, parent = nodes[alive], parent[alive]
        reached[nodes] = True
        chosen = winner[forest.sequence[nodes]] if level == 1 else winner[num_sequences + keep[parent]]
        accepted[nodes[chosen == forest.rank[nodes]]] = True
    return reached, accepted
