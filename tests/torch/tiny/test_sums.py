"""The sums: texts, rewards, lessons, `tiny:` names, and the shipped examples."""

import json
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Dataset
from rlhfspec.job.choices.algorithms import ALGORITHMS
from rlhfspec.job.file import read_job
from rlhfspec.tiny import check, paths, resolve, sums
from rlhfspec.tiny.recipe import DRAFT, RECIPES, SUMS, SUMS_DRAFT, TARGET_RECIPE, WIDE
from rlhfspec.tiny.tokenizer import BOS, EOS, PAD, decode
from rlhfspec.tiny.train import _lessons, train
from rlhfspec.training.data import load_rows

EXAMPLES = ROOT / "examples"
JOBS = sorted(path.name for path in EXAMPLES.glob("*.yaml"))
digits = st.integers(1, 6).flatmap(
    lambda count: st.tuples(*[st.integers(0, 10**count - 1).map(lambda n: str(n).zfill(count))] * 2)
)


@given(digits)
def test_work_without_slips_is_right(pair: tuple[str, str]) -> None:
    text = sums.worked(*pair)
    assert sums.correct(text, sums.answer(*pair)) == 1.0
    assert sums.steps(text) == 1.0
    assert int(sums.answer(*pair)) == int(pair[0]) + int(pair[1])


@given(digits, st.integers(1, 9))
def test_a_wrong_answer_earns_nothing(pair: tuple[str, str], off_by: int) -> None:
    wrong = str(int(sums.answer(*pair)) + off_by).zfill(len(sums.answer(*pair)))
    assert sums.correct(f"answer {wrong}", sums.answer(*pair)) == 0.0


@pytest.mark.parametrize(
    "completion", ["", "answer", "answer 1234", "answer 12", "answer 123 ", "answer 123, answer 124", "answer 123."]
)
def test_only_the_answer_at_the_very_end_counts(completion: str) -> None:
    assert sums.correct(completion, "123") == 0.0


@pytest.mark.parametrize(
    ("step", "share"),
    [
        ("8+5=13 keep 3 carry 1", 1.0),
        ("8+5+1=14 keep 4 carry 1", 1.0),
        ("8+5=13 keep 3 carry 0", 0.0),
        ("8+5=13 keep 4 carry 1", 0.0),
        ("8+5=12 keep 2 carry 1", 0.0),
        ("18+5=13 keep 3 carry 1", 0.0),
        ("nonsense carry 1", 0.0),
    ],
)
def test_steps_are_judged_one_by_one(step: str, share: float) -> None:
    assert sums.steps(step) == share


def test_slips_happen_and_are_carried_on() -> None:
    rng = random.Random(1)
    texts = [sums.worked("4848", "7575", rng) for _ in range(300)]
    right = sum(text == sums.worked("4848", "7575") for text in texts) / len(texts)
    assert 0.7 < right < 0.95  # about (1 - SLIP_RATE) ** 4
    assert all(re.search(r"answer \d+$", text) for text in texts)


def test_data_is_seeded_true_and_of_many_lengths() -> None:
    rows = sums.rows(400, seed=3)
    assert rows == sums.rows(400, seed=3) != sums.rows(400, seed=4)
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
    lengths = [len(row["prompt"]) for row in rows]
    assert set(lengths) == {2 * count + 2 for count in sums.NUM_DIGITS}
    assert [json.loads(line) for line in sums.jsonl(400, seed=3).splitlines()] == rows


def test_lessons_teach_responses_only_and_begin_as_prompts_do() -> None:
    for tokens, targets in islice(_lessons(SUMS), 3):
        assert (tokens[:, 0] == BOS).all()
        learnt = targets >= 0
        assert (targets[:, :-1][learnt[:, :-1]] == tokens[:, 1:][learnt[:, :-1]]).all()  # the next token
        for row, target in zip(tokens, targets, strict=True):
            taught = target[target >= 0]
            assert taught[-1] == EOS
            assert f"={decode(taught.tolist())}" in decode(row[row != PAD].tolist())
            assert "=" not in decode(row[: int((target >= 0).nonzero()[0])].tolist())


def test_a_start_learns_from_the_lessons() -> None:
    small = replace(SUMS_DRAFT, hidden_size=32, intermediate_size=48, num_steps=40)
    losses: list[str] = []
    train(small, losses.append)
    first, last = (float(re.search(r"([\d.]+) nats", line)[1]) for line in (losses[0], losses[-1]))  # type: ignore[index]
    assert last < first - 0.5


def test_what_was_made_before_keeps_its_name() -> None:
    names = {recipe.name: recipe.folder_name for recipe in (TARGET_RECIPE, DRAFT, WIDE)}
    assert names == {"target": "target-2e9955ebf3d2", "draft": "draft-2455cf378411", "wide": "wide-605a4117ec18"}
    assert len({recipe.folder_name for recipe in RECIPES.values()}) == len(RECIPES)


def test_tiny_names_become_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    data = resolve("tiny:sums.jsonl")
    assert len(load_rows(Dataset(path=data), tmp_path).records) == paths.DATA["sums.jsonl"][0]
    assert [file.name for file in Path(data).parent.iterdir()] == ["sums.jsonl"]
    folder = tmp_path / "models" / RECIPES["sums-draft"].folder_name
    folder.mkdir(parents=True)
    assert resolve("tiny:sums-draft") == str(folder)  # there already: nothing is made


@pytest.mark.parametrize("name", ["tiny:", "tiny:sum", "sums", "tiny:tiny:sums", "tiny:../sums"])
def test_unknown_tiny_names_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match="sums-draft"):
        check(name)
    with pytest.raises(InvalidRequest):
        resolve(name)


def test_every_algorithm_has_an_example() -> None:
    algorithms = {read_job(EXAMPLES / name).spec.algorithm.name for name in JOBS}
    assert algorithms == {*ALGORITHMS}


def test_the_examples_readme_names_every_job() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]({name})" in text for name in JOBS)


def test_no_held_out_sum_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHFSPEC_CACHE", str(tmp_path))
    files = [Path(paths.resolve(f"tiny:{name}")).read_text() for name in (paths.TRAINING, paths.HELD_OUT)]
    data, held_out = ({json.loads(line)["prompt"] for line in text.splitlines()} for text in files)
    assert len(files[1].splitlines()) == paths.DATA[paths.HELD_OUT][0]
    assert not data & held_out
