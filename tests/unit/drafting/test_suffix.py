"""The suffix and the model drafter; the vectorised tree walk equals its slow twin."""

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from counting import counting_calls
from hypothesis import given, strategies as st
from twins.tree import accept_slow

from rlhfspec.common.arrays import FloatArray, Floats, IntArray
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import DraftBatch, DraftPlan, Forest
from rlhfspec.engine.drafting.contexts import ORDERS, ContextIndex
from rlhfspec.engine.drafting.fixed import Always
from rlhfspec.engine.drafting.levels import LevelTerms
from rlhfspec.engine.drafting.model import DraftRows, Expanded, GrownTrees, ModelDrafter, Roots
from rlhfspec.engine.drafting.noise import gumbel, gumbels, philox
from rlhfspec.engine.drafting.suffix import SuffixDrafter
from rlhfspec.engine.drafting.tree import accept, ancestors, index_in_sequence
from rlhfspec.testing.drafter import MOST_TOKENS, DrafterContract, DraftTable, refuse_malformed

CHAIN = DraftPlan(drafter="suffix", depth=8)
TREE = DraftPlan(drafter="suffix", depth=6, width=2, branch=3)


class TestSuffix(DrafterContract):
    def make(self, table: DraftTable) -> SuffixDrafter:
        return SuffixDrafter()


def propose(drafter: SuffixDrafter, batch: DraftBatch, plan: DraftPlan = CHAIN) -> Forest:
    return drafter.propose(batch, plan, AcceptanceModel(64), Always())


def test_philox_gives_the_published_words() -> None:
    ones = 0xFFFFFFFF
    assert philox((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), *[st.integers(0, 2**31 - 1)] * 2), min_size=1, max_size=70))
def test_vectorized_noise_equals_scalar_noise(where: list[tuple[int, int, int]]) -> None:
    seeds, positions, tokens = zip(*where, strict=True)
    assert gumbels(seeds, positions, tokens) == [gumbel(*one) for one in where]


def test_noise_is_standard_gumbel() -> None:
    drawn = np.array(gumbels([5] * 20000, list(range(20000)), [3] * 20000))
    assert drawn.mean() == pytest.approx(0.5772, abs=0.03)
    assert drawn.var() == pytest.approx(np.pi**2 / 6, abs=0.06)


@given(st.lists(st.integers(0, 3), min_size=3, max_size=80), st.integers(1, 79))
def test_an_index_grown_in_pieces_is_the_index_of_the_whole(tokens: list[int], cut: int) -> None:
    whole, pieces = ContextIndex(), ContextIndex()
    text, cut = tuple(tokens), min(cut, len(tokens))
    whole.add(text, start=0)
    pieces.add(text[:cut], start=0)
    pieces.add(text, start=cut)
    for end in range(len(text) + 1):
        context = text[max(end - ORDERS[0], 0) : end]
        assert whole.continuations(context) == pieces.continuations(context)


def test_lookups_see_tokens_added_later() -> None:
    index = ContextIndex()
    for tokens in ((1, 2, 5), (1, 2, 6), (1, 2, 7), (1, 2, 7), (1, 2, 7)):
        index.add(tokens, start=0)
        found, log_chances, _ = index.continuations((1, 2))
        assert tokens[-1] in found
    assert max(zip(log_chances, found, strict=True))[1] == 7


@given(st.lists(st.integers(0, 2), min_size=3, max_size=80))
def test_chances_are_a_distribution_over_what_followed_the_longest_context(tokens: list[int]) -> None:
    index, text = ContextIndex(), tuple(tokens)
    index.add(text, start=0)
    for end in range(2, len(text) + 1):
        context = text[max(end - ORDERS[0], 0) : end]
        candidates, log_chances, log_rest = index.continuations(context)
        if candidates:
            assert sum(np.exp(log_chances)) + np.exp(log_rest) == pytest.approx(1.0, abs=1e-5)
        followed: Counter[int] = Counter()
        for order in ORDERS:  # the slow twin: look through the whole text
            if order <= len(context):
                wanted = context[-order:]
                for i in range(order, len(text)):
                    if text[i - order : i] == wanted:
                        followed[text[i]] += 1
            if followed:
                break
        assert set(followed) <= set(candidates)
        assert bool(followed) == bool(candidates)


def test_the_drafter_continues_as_the_text_did_before() -> None:
    table, drafter = DraftTable(1, temperature=0.0), SuffixDrafter()
    table.begin(drafter, 0, [*range(40), 7, 8, 9, 10])
    forest = propose(drafter, table.batch(0))
    assert forest.token.tolist() == [11, 12, 13, 14, 15, 16, 17, 18]
    assert forest.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert forest.depth.tolist() == list(range(1, 9))
    assert (np.diff(forest.path_acceptance) < 0).all()


def test_the_drafter_learns_from_siblings_and_history() -> None:
    prompt, answer = [1, 2, 3, 4, 5], [50, 51, 52, 53, 54, 55, 56]
    for source in ("running", "finished", "history"):
        table, drafter = DraftTable(3, temperature=0.0), SuffixDrafter()
        if source == "history":
            table.begin(drafter, 1, prompt, "g", history=((*prompt, *answer),))
        else:
            table.begin(drafter, 0, prompt, "g")
            table.begin(drafter, 1, prompt, "g")
            before = table.batch(0)
            table.write(0, answer)
            drafter.observe(before, table.lengths[[0]])
            if source == "finished":
                drafter.forget(0)
            else:
                propose(drafter, table.batch(0, 1))
        table.write(1, answer[:2])
        assert propose(drafter, table.batch(1)).token.tolist() == answer[2:], source


def test_the_drafter_does_not_read_sequences_of_other_groups() -> None:
    table, drafter = DraftTable(2, temperature=0.0), SuffixDrafter()
    table.begin(drafter, 0, list(range(30)), "a")
    table.begin(drafter, 1, [90, 3, 4, 5], "b")
    propose(drafter, table.batch(0))
    assert propose(drafter, table.batch(1)).size == 0


def test_trees_are_as_deep_as_plan_and_room_allow() -> None:
    random = np.random.default_rng(0)
    table, drafter = DraftTable(6), SuffixDrafter()
    for row in range(6):
        table.begin(drafter, row, random.integers(0, 3, 300).tolist(), "shared" if row < 3 else "")
    table.room[:] = [500, 4, 3, 2, 1, 0]
    for _ in range(4):  # the first ones index the prompts
        forest = propose(drafter, batch := table.batch(0, 1, 2, 3, 4, 5), TREE)
    refuse_malformed(forest, batch, TREE)
    assert forest.size > 12
    assert (forest.gap <= 30).all()
    deepest = {sequence: int(forest.depth[forest.sequence == sequence].max(initial=0)) for sequence in range(6)}
    assert deepest == {0: 6, 1: 3, 2: 2, 3: 1, 4: 0, 5: 0}, "no deeper than room - 1: the verification adds one token"


def target_of(text: list[int], order: int) -> Callable[[int, int, IntArray], int]:
    """Return a target that samples by the law from a text's continuations."""
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for i in range(order, len(text)):
        counts[tuple(text[i - order : i])][text[i]] += 1

    def sample(seed: int, position: int, so_far: IntArray) -> int:
        found = counts.get(tuple(so_far[-order:].tolist()), Counter({0: 1}))
        scored = ((np.log(count) + gumbel(seed, position, token), token) for token, count in found.items())
        return max(scored)[1]

    return sample


def generate(
    drafter: SuffixDrafter,
    table: DraftTable,
    rows: list[int],
    sample: Callable[[int, int, IntArray], int],
    steps: int,
    *,
    plan: DraftPlan,
) -> tuple[int, AcceptanceModel]:
    acceptance, num_accepted = AcceptanceModel(64), 0
    for _ in range(steps):
        batch = table.batch(*rows)
        forest = drafter.propose(batch, plan, acceptance, Always())
        accepted = np.zeros(forest.size, np.bool_)
        reached = np.zeros(forest.size, np.bool_)
        for i, row in enumerate(rows):
            node, goes_on = -1, True
            while goes_on:
                length = int(table.lengths[row])
                token = sample(int(batch.seeds[i]), length - int(table.prompt_lengths[row]), table.tokens[row, :length])
                table.write(row, [token])
                children = np.flatnonzero((forest.parent == node) & (forest.sequence == i))
                reached[children] = True
                hit = children[forest.token[children] == token]
                goes_on = len(hit) > 0
                if goes_on:
                    node = int(hit[0])
                    accepted[node] = True
        num_accepted += int(accepted.sum())
        drafter.observe(batch, table.lengths[rows])
        tested = np.flatnonzero(reached)
        rows_of, depth, rank = (a[tested] for a in (batch.rows[forest.sequence], forest.depth, forest.rank))
        acceptance.observe("suffix", rows_of, depth, rank, forest.gap[tested], accepted[tested])
    return num_accepted, acceptance


def templated_text(seed: int, num_sentences: int) -> list[int]:
    random = np.random.default_rng(seed)
    words = ["".join(chr(97 + int(c)) for c in random.integers(0, 26, 5)) for _ in range(24)]
    sentences = [[words[int(w)] for w in random.integers(0, 24, 5)] for _ in range(5)]
    text = ""
    for _ in range(num_sentences):
        sentence = list(sentences[int(random.integers(5))])
        sentence[int(random.integers(5))] = words[int(random.integers(24))]
        text += " ".join(sentence) + ". "
    return list(text.encode())


def test_shared_noise_finds_more_of_the_targets_choices() -> None:
    """The same counts are ranked with the target's noise and with another seed's."""
    sample = target_of(text := templated_text(0, 400), 3)
    accepted = {}
    for shift in (0, 1000):
        table, drafter = DraftTable(4), SuffixDrafter()
        for row in range(4):
            table.begin(drafter, row, text[:600], "g")

        def shifted(seed: int, t: int, so_far: IntArray, shift: int = shift) -> int:
            return sample(seed + shift, t, so_far)

        accepted[shift], _ = generate(drafter, table, [0, 1, 2, 3], shifted, 60, plan=CHAIN)
    assert accepted[0] > 1.15 * accepted[1000], accepted


def test_remembered_lookups_equal_fresh_ones() -> None:
    """A repeated context meets other noise; a repeated position meets the same."""
    random = np.random.default_rng(3)
    block = random.integers(0, 2, 20).tolist()
    prompt = random.integers(0, 2, 500).tolist()
    table, drafter = DraftTable(1), SuffixDrafter()
    table.begin(drafter, 0, prompt)
    propose(drafter, table.batch(0), TREE)
    for _ in range(6):
        table.write(0, block)
        batch = table.batch(0)
        fresh = SuffixDrafter()
        fresh.start(0, table.tokens[0, : table.lengths[0]], "", ())
        expected = propose(fresh, batch, TREE)
        for _ in range(2):  # found, then remembered
            forest = propose(drafter, batch, TREE)
            assert forest.token.tolist() == expected.token.tolist()
            assert forest.gap.tolist() == expected.gap.tolist()


def test_calibration_learns_how_far_to_trust_a_context() -> None:
    text = templated_text(1, 400)
    table, drafter = DraftTable(4), SuffixDrafter()
    for row in range(4):
        table.begin(drafter, row, text[:400], "g")
    num_accepted, acceptance = generate(drafter, table, [0, 1, 2, 3], target_of(text, 4), 80, plan=TREE)
    assert num_accepted > 320, "more than one a sequence and step"
    assert acceptance.calibration_error() < 0.06
    gaps = np.array([0.1, 2.0, 8.0], np.float32)
    ones = np.ones(3, np.int32)
    chances: FloatArray = acceptance.predict("suffix", ones * 0, ones * 3, ones * 0, gaps)
    assert chances[2] > chances[1] > chances[0]
    assert chances[2] - chances[0] > 0.15, "the gap must tell safe from unsafe"


def test_memory_is_bounded_and_given_back() -> None:
    random = np.random.default_rng(0)
    table, drafter = DraftTable(4), SuffixDrafter(max_contexts=4000, max_idle_groups=3)
    for generation in range(60):
        row = generation % 4
        table.begin(drafter, row, random.integers(0, 200, 900).tolist(), f"group {generation}")
        propose(drafter, table.batch(row))
        propose(drafter, table.batch(row))
        drafter.forget(row)
        assert sum(len(group.index) for group in drafter._groups.values()) <= 4 * (4000 + 4 * 900)
    assert len(drafter._groups) == 3
    assert drafter._sequences == {}


def test_a_late_member_finds_its_group_and_a_restart_does_not_leak() -> None:
    table, drafter = DraftTable(2, temperature=0.0), SuffixDrafter(max_idle_groups=1)
    table.begin(drafter, 0, list(range(30)), "g")
    propose(drafter, table.batch(0))
    drafter.forget(0)
    table.begin(drafter, 1, [3, 4, 5, 6], "g")
    assert propose(drafter, table.batch(1)).token.tolist() == list(range(7, 15))
    table.begin(drafter, 1, [3, 4, 5, 6], "g")  # the same row again, without a forget
    drafter.forget(1)
    drafter.forget(1)
    table.begin(drafter, 0, [1, 2], "h")
    drafter.forget(0)
    assert list(drafter._groups) == ["h"]


def test_a_cleared_drafter_remembers_no_finished_group() -> None:
    table, drafter = DraftTable(2, temperature=0.0), SuffixDrafter()
    table.begin(drafter, 0, list(range(30)), "gone")
    table.begin(drafter, 1, list(range(30)), "here")
    for _ in range(2):
        propose(drafter, table.batch(0, 1))
    drafter.forget(0)
    drafter.clear()
    assert list(drafter._groups) == ["here"]
    table.begin(drafter, 0, [3, 4, 5, 6], "gone")
    assert propose(drafter, table.batch(0)).size == 0


def test_a_long_text_is_indexed_over_several_proposals() -> None:
    table, drafter = DraftTable(1, temperature=0.0), SuffixDrafter()
    table.begin(drafter, 0, [])
    table.write(0, [*range(1500), 3, 4, 5])
    batch = table.batch(0)
    assert propose(drafter, batch).token.tolist()[:5] == [6, 7, 8, 9, 10]
    indexed = drafter._sequences[0].num_indexed
    assert 0 < indexed < 1500
    propose(drafter, batch)
    assert drafter._sequences[0].num_indexed > indexed


def test_a_proposal_takes_few_calls_a_token() -> None:
    sample = target_of(text := templated_text(2, 800), 4)
    table, drafter = DraftTable(64), SuffixDrafter()
    rows = list(range(64))
    for row in rows:
        table.begin(drafter, row, text[row : row + 200], f"group {row // 8}")
    _, acceptance = generate(drafter, table, rows, sample, 6, plan=CHAIN)
    batch = table.batch(*rows)
    propose(drafter, batch)  # what is new since the last step has been indexed
    with counting_calls() as calls:
        forest = drafter.propose(batch, CHAIN, acceptance, Always())
        num_calls = calls()
    assert forest.size > 200
    assert num_calls / forest.size < 100


class Successors:
    """`DraftEngine` in which the next numbers follow a token, the nearest with the best score."""

    def __init__(self, table: DraftTable, vocab_size: int = 7) -> None:
        self._vocab_size = vocab_size
        self.slots = np.arange(table.num_rows * MOST_TOKENS, dtype=np.int32).reshape(table.num_rows, MOST_TOKENS)
        self.capacity = np.full(table.num_rows, MOST_TOKENS, np.int32)
        self.cached = np.zeros(table.num_rows, np.int32)

    def candidates(self, rows: DraftRows, k: int) -> tuple[IntArray, FloatArray]:
        last = rows.tokens[rows.logit_rows]
        order = np.arange(k, dtype=np.int32)
        tokens = (last[:, None] + 1 + order) % self._vocab_size
        return tokens.astype(np.int32), np.broadcast_to(-order.astype(np.float32), tokens.shape)

    def grow(
        self, batch: DraftBatch, plan: DraftPlan, roots: Roots, curves: tuple[Floats, Floats], terms: LevelTerms | None
    ) -> GrownTrees | None:
        return None

    def keep(self, batch: DraftBatch, expanded: Expanded, new_lengths: IntArray) -> bool:
        return False

    def prefix_computed(self, row: int) -> None:
        """Return 0, as nothing is shared."""

    def forget(self, row: int) -> None: ...


class RestartedModelDrafter(ModelDrafter):
    """Drafter whose engine reports a row's cache when a sequence begins."""

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None:
        super().start(row, tokens, group, history)
        self.engine.cached[row] = 0


class TestModelDrafter(DrafterContract):
    def make(self, table: DraftTable) -> ModelDrafter:
        return RestartedModelDrafter(Successors(table))


def random_forest(rng: np.random.Generator, num_sequences: int, size: int, vocab: int) -> Forest:
    sequence, parent, depth, token = [], [], [], []
    taken: set[tuple[int, int, int]] = set()
    for _ in range(size):
        owner = int(rng.integers(num_sequences))
        above = int(rng.choice([-1, *(node for node, of in enumerate(sequence) if of == owner)]))
        word = int(rng.integers(vocab))
        if (owner, above, word) in taken:
            continue
        taken.add((owner, above, word))
        sequence.append(owner)
        parent.append(above)
        depth.append(1 if above < 0 else depth[above] + 1)
        token.append(word)
    count = len(token)
    zeros = np.zeros(count, np.float32)
    ints = [np.asarray(values, np.int32) for values in (sequence, parent, depth, token)]
    return Forest(
        sequence=ints[0], parent=ints[1], depth=ints[2], token=ints[3], rank=np.zeros(count, np.int32),
        gap=zeros, path_acceptance=zeros,
    )  # fmt: skip


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 40))
def test_walk_equals_its_slow_twin(seed: int, num_sequences: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, num_sequences, size, vocab=3)
    roots = rng.integers(0, 3, num_sequences).astype(np.int32)
    choices = rng.integers(0, 3, forest.size).astype(np.int32)
    walk = accept(forest, num_sequences, roots, choices)
    for sequence, expected in enumerate(accept_slow(forest, num_sequences, roots, choices)):
        assert walk.path[sequence, 1 : 1 + walk.num_accepted[sequence]].tolist() == expected
        assert np.flatnonzero(walk.accepted & (forest.sequence == sequence)).tolist() == sorted(expected)
    for node in range(forest.size):
        parent = forest.parent[node]
        assert walk.reached[node] == (parent < 0 or walk.accepted[parent])


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 30))
def test_ancestors_list_the_path_from_the_top(seed: int, num_sequences: int, size: int) -> None:
    forest = random_forest(np.random.default_rng(seed), num_sequences, size, vocab=4)
    table = ancestors(forest)
    for node in range(forest.size):
        path, current = [], node
        while current >= 0:
            path.append(current)
            current = int(forest.parent[current])
        assert table[node][table[node] >= 0].tolist() == path[::-1]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 30))
def test_taking_a_closed_part_keeps_the_structure(seed: int, num_sequences: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, num_sequences, size, vocab=4)
    wanted = rng.random(forest.size) < 0.7
    for node in range(forest.size):  # closed under parents
        if forest.parent[node] >= 0 and not wanted[forest.parent[node]]:
            wanted[node] = False
    keep = np.flatnonzero(wanted).astype(np.int32)
    part = forest.take(keep)
    for new, old in enumerate(keep):
        assert part.token[new] == forest.token[old]
        assert (part.parent[new] == -1) == (forest.parent[old] == -1)
        if part.parent[new] >= 0:
            assert keep[part.parent[new]] == forest.parent[old]


def test_index_in_sequence_counts_each_sequence_apart() -> None:
    index = index_in_sequence(forest := random_forest(np.random.default_rng(3), 3, 25, vocab=9), 3)
    for sequence in range(3):
        assert index[forest.sequence == sequence].tolist() == list(range(int((forest.sequence == sequence).sum())))
