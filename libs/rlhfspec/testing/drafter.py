"""Contract of drafters: valid trees of the requested shape after any history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import DraftBatch, Drafter, DraftPlan, Forest
from rlhfspec.engine.drafting.fixed import Always

MOST_TOKENS = 2048


class DraftTable:
    def __init__(self, num_rows: int, *, temperature: float = 1.0) -> None:
        self.num_rows = num_rows
        self.tokens = np.zeros((num_rows, MOST_TOKENS), np.int32)
        self.lengths = np.zeros(num_rows, np.int32)
        self.prompt_lengths = np.zeros(num_rows, np.int32)
        self.room = np.full(num_rows, 500, np.int32)
        self.temperatures = np.full(num_rows, temperature, np.float32)

    def begin(
        self, drafter: Drafter, row: int, prompt: list[int], group: str = "", history: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.tokens[row, : len(prompt)] = prompt
        self.lengths[row] = self.prompt_lengths[row] = len(prompt)
        drafter.start(row, self.tokens[row, : len(prompt)], group, history)

    def write(self, row: int, tokens: list[int]) -> None:
        end = int(self.lengths[row]) + len(tokens)
        self.tokens[row, int(self.lengths[row]) : end] = tokens
        self.lengths[row] = end

    def batch(self, *rows: int) -> DraftBatch:
        index = np.array(rows, np.int32)
        return DraftBatch(
            rows=index,
            lengths=self.lengths[index],
            prompt_lengths=self.prompt_lengths[index],
            room=self.room[index],
            seeds=(index + 11).astype(np.uint64),
            temperatures=self.temperatures[index],
            tokens=self.tokens,
        )


class NotedAcceptance(AcceptanceModel):
    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.names: set[str] = set()

    def predict(self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray) -> FloatArray:
        self.names.add(drafter)
        return super().predict(drafter, rows, depth, rank, gap)


def refuse_malformed(forest: Forest, batch: DraftBatch, plan: DraftPlan) -> None:
    for node in range(forest.size):
        sequence, parent, depth = int(forest.sequence[node]), int(forest.parent[node]), int(forest.depth[node])
        assert 0 <= sequence < batch.size, "a node belongs to a sequence of the batch"
        assert -1 <= parent < node, "a parent comes before its children"
        assert depth <= min(plan.depth, int(batch.room[sequence]) - 1), "verification adds one more token"
        assert 0 < forest.path_acceptance[node] < 1
        if parent < 0:
            assert depth == 1
        else:
            assert sequence == forest.sequence[parent]
            assert depth == forest.depth[parent] + 1
            assert forest.path_acceptance[node] <= forest.path_acceptance[parent]
    siblings = defaultdict(list)
    for node in range(forest.size):
        siblings[int(forest.sequence[node]), int(forest.parent[node])].append(node)
    for nodes in siblings.values():
        assert [int(forest.rank[node]) for node in nodes] == list(range(len(nodes))), "the best candidate comes first"
        assert len(nodes) <= plan.branch
        assert len({int(forest.token[node]) for node in nodes}) == len(nodes), "siblings differ"
    expanded = defaultdict(set)
    for node in range(forest.size):
        expanded[int(forest.depth[node])].add((int(forest.sequence[node]), int(forest.parent[node])))
    assert all(len(expanded[depth]) <= plan.width * batch.size for depth in range(2, plan.depth + 1))
    assert (forest.gap >= 0).all()


def same(one: Forest, other: Forest) -> bool:
    names = ("sequence", "parent", "depth", "token", "rank", "gap", "path_acceptance")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


Step = tuple[str, int, int]  # event, row, seed
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "forget", "propose", "propose", "reset"]), st.integers(0, 3), st.integers(0, 99)
    ),
    max_size=30,
)


class DrafterContract:
    plans: ClassVar[tuple[DraftPlan, ...]] = (
        DraftPlan(drafter="any", depth=1),
        DraftPlan(drafter="any", depth=8),
        DraftPlan(drafter="any", depth=6, width=2, branch=3),
    )
    vocab_size: ClassVar[int] = 3  # of the texts: few tokens, so that suffixes repeat

    def make(self, table: DraftTable) -> Drafter:
        """Return a new drafter for an engine with this table."""
        raise NotImplementedError

    def text(self, seed: int, length: int = 200) -> list[int]:
        drawn: list[int] = np.random.default_rng(seed).integers(0, self.vocab_size, length).tolist()
        return drawn

    def propose(self, drafter: Drafter, batch: DraftBatch, plan: DraftPlan) -> Forest:
        before = batch.tokens.copy()
        batch.tokens.flags.writeable = False
        try:
            forest = drafter.propose(batch, plan, AcceptanceModel(64), Always())
        finally:
            batch.tokens.flags.writeable = True
        assert np.array_equal(batch.tokens, before), "a drafter must not change the token table"
        refuse_malformed(forest, batch, plan)
        return forest

    def each_plan(self, check: Callable[[DraftTable, Drafter, DraftPlan], None]) -> None:
        for plan in self.plans:
            table = DraftTable(6)
            check(table, self.make(table), plan)

    def test_trees_are_well_formed_and_no_deeper_than_plan_and_room(self) -> None:
        def check(table: DraftTable, drafter: Drafter, plan: DraftPlan) -> None:
            for row in range(6):
                table.begin(drafter, row, self.text(row), "shared" if row < 3 else "")
            table.room[:] = [500, 4, 3, 2, 1, 0]
            for round_ in range(4):
                batch = table.batch(0, 1, 2, 3, 4, 5)
                self.propose(drafter, batch, plan)
                for row in range(6):
                    table.write(row, self.text(100 + round_ + row, 1 + row % 3))
                drafter.observe(batch, table.lengths.copy())

        self.each_plan(check)

    def test_something_is_drafted_for_a_text_that_repeats_itself(self) -> None:
        def check(table: DraftTable, drafter: Drafter, plan: DraftPlan) -> None:
            table.begin(drafter, 0, [0, 1, 2] * 20)
            assert self.propose(drafter, table.batch(0), plan).size > 0

        self.each_plan(check)

    def test_a_token_of_room_is_the_verifications(self) -> None:
        def check(table: DraftTable, drafter: Drafter, plan: DraftPlan) -> None:
            for row in range(2):
                table.begin(drafter, row, [0, 1, 2] * 20)
            table.room[:2] = [0, 1]
            assert self.propose(drafter, table.batch(0, 1), plan).size == 0

        self.each_plan(check)

    def test_what_it_proposes_depends_on_its_calls_alone(self) -> None:
        for plan in self.plans:
            found: list[list[Forest]] = []
            for _ in range(2):
                table = DraftTable(4)
                drafter, forests = self.make(table), list[Forest]()
                for row in range(4):
                    table.begin(drafter, row, self.text(row), "g", history=(tuple(self.text(9)),))
                for round_ in range(5):
                    batch = table.batch(2, 0, 3)
                    forests.append(self.propose(drafter, batch, plan))
                    for row in (2, 0, 3):
                        table.write(row, self.text(round_ + row, 2))
                    drafter.observe(batch, table.lengths[batch.rows])
                found.append(forests)
            assert all(map(same, *found))

    def test_acceptance_is_asked_under_the_drafters_name(self) -> None:
        def check(table: DraftTable, drafter: Drafter, plan: DraftPlan) -> None:
            table.begin(drafter, 0, [0, 1, 2] * 20)
            acceptance = NotedAcceptance(64)
            named = DraftPlan(drafter=drafter.name, depth=plan.depth, width=plan.width, branch=plan.branch)
            drafter.propose(table.batch(0), named, acceptance, Always())
            assert acceptance.names == {drafter.name}

        self.each_plan(check)

    @settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(steps=STEPS, plan=st.integers(0, 99))
    def test_sequences_come_and_go_in_any_order(self, steps: list[Step], plan: int) -> None:
        table = DraftTable(4)
        drafter, running, chosen = self.make(table), set[int](), self.plans[plan % len(self.plans)]
        for what, row, seed in steps:
            if what == "start":
                table.begin(drafter, row, self.text(seed, 1 + seed), ("", "g")[seed % 2])
                running.add(row)
            elif what == "forget":
                drafter.forget(row)
                running.discard(row)
            elif what == "reset":
                drafter.reset()
            elif running:
                batch = table.batch(*sorted(running))
                self.propose(drafter, batch, chosen)
                for each in running:
                    table.write(each, self.text(seed + each, 1 + seed % 4))
                drafter.observe(batch, table.lengths[batch.rows])

    def test_a_plan_that_is_asked_of_nothing_gives_nothing(self) -> None:
        def check(table: DraftTable, drafter: Drafter, plan: DraftPlan) -> None:
            assert self.propose(drafter, table.batch(), plan).size == 0

        self.each_plan(check)
