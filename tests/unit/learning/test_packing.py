import pytest
from hypothesis import given, strategies as st

from rlhfspec.training.learning.packing import pack, pack_groups, split_evenly

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths_lists, st.integers(1, 100), st.integers(1, 4))
def test_micro_batches_are_whole_ordered_and_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    packed = pack(lengths, budget, multiple_of=ranks)
    assert sorted(index for members in packed for index in members) == list(range(len(lengths)))
    assert len(packed) % ranks == 0
    assert all(members == sorted(members) for members in packed)
    for members in packed:
        assert sum(lengths[index] for index in members) <= budget or len(members) == 1
    num_empty = sum(not members for members in packed)
    assert num_empty < ranks
    filled = packed[: len(packed) - num_empty]
    assert all(filled)
    assert filled == sorted(filled)
    assert num_empty == 0 or len(lengths) < len(packed)


@given(lengths_lists, st.integers(60, 200))
def test_micro_batches_are_few_and_even(lengths: list[int], budget: int) -> None:
    loads = [sum(lengths[index] for index in members) for members in pack(lengths, budget)]
    assert len(loads) <= 2 * -(-sum(lengths) // budget)
    assert max(loads) - min(loads) <= max(lengths)


def test_one_micro_batch_when_everything_fits() -> None:
    assert pack([10, 20, 30], 60) == [[0, 1, 2]]
    assert len(pack([10, 20, 30], 59)) == 2


def test_long_sequences_do_not_ask_for_empty_micro_batches() -> None:
    assert pack([1000, 1, 1000], 10) == [[0], [1], [2]]


@given(st.integers(0, 50), st.integers(1, 10))
def test_mini_batches_are_runs_of_nearly_one_size(count: int, parts: int) -> None:
    runs = split_evenly(count, parts)
    assert [index for run in runs for index in run] == list(range(count))
    assert len(runs) == min(parts, count)
    assert not runs or max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize("multiple_of", [1, 3])
def test_an_even_load_over_ranks(multiple_of: int) -> None:
    assert [len(members) for members in pack([7] * 12, 14, multiple_of=multiple_of)] == [2] * 6


Groups = list[tuple[int, list[int]]]
answer_lists = st.lists(st.integers(0, 20), min_size=1, max_size=6)
group_lists = st.lists(st.tuples(st.integers(1, 40), answer_lists), min_size=1, max_size=8)


def samples_of(groups: Groups) -> tuple[list[tuple[int, ...]], list[int]]:
    prompts = [(number,) * length for number, (length, answers) in enumerate(groups) for _ in answers]
    return prompts, [answer for _, answers in groups for answer in answers]


def run_tokens(members: list[int], prompts: list[tuple[int, ...]], answers: list[int]) -> int:
    return sum(map(len, {prompts[index] for index in members})) + sum(answers[index] for index in members)


@given(group_lists, st.integers(1, 120), st.integers(1, 4))
def test_micro_batches_of_groups_are_whole_ordered_and_within_budget(groups: Groups, budget: int, ranks: int) -> None:
    prompts, answers = samples_of(groups)
    packed = pack_groups(prompts, answers, budget, multiple_of=ranks)
    assert sorted(index for members in packed for index in members) == list(range(len(prompts)))
    assert all(members == sorted(members) for members in packed)
    assert len(packed) % ranks == 0
    assert all(packed[: 1 - ranks or None]), "only ranks without a sample have nothing to do"
    for members in packed:
        assert run_tokens(members, prompts, answers) <= budget or len(members) == 1


@given(group_lists)
def test_a_group_that_fits_stays_whole(groups: Groups) -> None:
    prompts, answers = samples_of(groups)
    packed = pack_groups(prompts, answers, 200)
    assert all(sum(prompt in {prompts[index] for index in members} for members in packed) == 1 for prompt in prompts)


@given(lengths_lists, st.integers(1, 100), st.integers(1, 4))
def test_packing_groups_of_single_samples_equals_packing_samples(lengths: list[int], budget: int, ranks: int) -> None:
    prompts = [(number,) for number in range(len(lengths))]
    groups = pack_groups(prompts, [length - 1 for length in lengths], budget, multiple_of=ranks)
    assert groups == pack(lengths, budget, multiple_of=ranks)


def test_a_group_is_cut_where_a_rank_would_have_less_to_do() -> None:
    assert pack_groups([(1,) * 10] * 8, [9] * 8, 100, multiple_of=2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    two = pack_groups([(1,) * 10] * 4 + [(2,) * 10] * 4, [9] * 8, 100, multiple_of=2)
    assert two == [[0, 1, 2, 3], [4, 5, 6, 7]]
    three = pack_groups([(number,) * 90 for number in (1, 1, 2, 2, 3, 3)], [5] * 6, 200, multiple_of=2)
    assert three == [[0, 1, 4, 5], [2, 3]], "a prompt that is long beside its answers stays whole"
