"""Tasks of reasoning-gym as data, and their scorer as a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Dataset
from rlhfspec.job.file.paths import is_local, is_made_here
from rlhfspec.tiny import check, resolve
from rlhfspec.training.data import load_rows
from rlhfspec.training.scoring.rewards.imports import load_function

pytest.importorskip("reasoning_gym", reason="pip install '.[reasoning-gym]'")
SUMS = "reasoning-gym:chain_sum?size=6&seed=3&min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def test_rows_hold_examples_question_and_what_the_scorer_reads() -> None:
    rows = load_rows(Dataset(path=resolve(SUMS), messagesColumn="messages")).records
    assert len(rows) == 6
    for row in rows:
        system, *turns, question = row["messages"]
        assert (system["role"], question) == ("system", {"role": "user", "content": row["prompt"]})
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
        assert row["task"] == "chain_sum"
        assert row["prompt"] not in [turn["content"] for turn in turns]
        left, sign, right = row["prompt"].removesuffix(" =").split()[-3:]
        assert int(row["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_the_reward_is_that_of_the_reasoning_gym_task() -> None:
    reward = load_function("reasoning-gym", Path(), field="function")
    [row, *_] = load_rows(Dataset(path=resolve(SUMS), messagesColumn="messages")).records
    assert reward(f"I think <answer>{row['answer']}</answer>", row["entry"]) == 1.0
    assert reward("<answer>no</answer>", row["entry"]) < 0.1
    assert reward(row["answer"], row["entry"]) == 0.0, "without tags there is no answer"


def test_rows_depend_on_the_seed_and_several_tasks_share_one_file() -> None:
    assert resolve(SUMS) == resolve(SUMS) != resolve(SUMS.replace("seed=3", "seed=4"))
    both = Path(resolve("reasoning-gym:chain_sum?size=2&examples=0+letter_counting?size=3"))
    rows = [json.loads(line) for line in both.read_text().splitlines()]
    assert [row["task"] for row in rows] == ["chain_sum"] * 2 + ["letter_counting"] * 3
    assert len(rows[0]["messages"]) == 2


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("reasoning-gym:chain_sun", "did you mean chain_sum"),
        ("reasoning-gym:chain_sum?terms=2", "chain_sum refuses these settings"),
        ("reasoning-gym:chain_sum?min_terms=9&max_terms=2", "chain_sum refuses these settings"),
    ],
)
def test_a_wrong_task_or_setting_is_named(path: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem.replace("?", r"\?")):
        check(path)


def test_names_of_generated_models_and_data_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    assert [is_local(path, tmp_path) for path in ("smollm2", SUMS, "./smollm2")] == [False, False, True]
    assert [is_made_here(path) for path in ("smollm2", SUMS, "smollm2-mine", "tiny:sums")] == [True, True, False, True]
