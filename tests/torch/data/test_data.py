import csv
import gzip
import json
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st

from rlhfspec.errors import DataExhausted, InvalidRequest, JobError
from rlhfspec.job import Dataset, Model
from rlhfspec.sweep.classes import tiny_config
from rlhfspec.tiny.tokenizer import BOS, VOCAB_SIZE, encode, hugging_face_tokenizer
from rlhfspec.training.data import Order, Prompts, Rows, load_rows, load_tokenizer
from rlhfspec.training.data.order import num_steps

RECORDS = [{"prompt": f"{n}+1=", "answer": n + 1, "tags": ["sum", {"digits": 1}]} for n in range(7)]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def prompts_of(records: list[dict[str, Any]], tokenizer: Any = None, **fields: Any) -> Prompts:
    dataset = Dataset(path="memory", **fields)
    rows = Rows(source="memory", records=records)
    return Prompts(rows, tokenizer or hugging_face_tokenizer(), dataset, seed=3, prompts_per_step=2)


def write_json_lines(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(record).encode() for record in RECORDS))
    return path


def write_parquet(folder: Path) -> Path:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record | {"tags": ["sum"]} for record in RECORDS]), path)
    return path


def write_folder(folder: Path) -> Path:
    path = folder / "saved"
    rows = datasets.Dataset.from_list([record | {"tags": ["sum"]} for record in RECORDS])
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(str(path))
    return path


def write_json_list(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(RECORDS, indent=2))
    return path


def write_lines_named_json(folder: Path) -> Path:
    return write_json_lines(folder).rename(folder / "lines.json")


def write_csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "tags"])
        writer.writeheader()
        writer.writerows(RECORDS)
    return path


def compressed(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def write_gz(folder: Path) -> Path:
        plain = write(folder)
        path = plain.with_name(f"{plain.name}.gz")
        path.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))
        return path

    return write_gz


TEXT_FILES = [write_json_lines, write_json_list, write_lines_named_json, write_csv]


@pytest.mark.parametrize("write", [*TEXT_FILES, *map(compressed, TEXT_FILES), write_parquet, write_folder])
def test_every_source_gives_the_same_rows(tmp_path: Path, write: Any) -> None:
    found = [(row["prompt"], int(row["answer"])) for row in load_rows(Dataset(path=str(write(tmp_path)))).records]
    assert found == [(r["prompt"], r["answer"]) for r in RECORDS]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", b"prompt,answer\n1,2\n1\n3,4,5\n", "line 3: spec.dataset.path: has 1 values, and the first"),
        ("a.csv", b"prompt,prompt\n1,2\n", "must name every column once; it says prompt, prompt"),
        ("a.csv", b'prompt\n"1\n', "is not CSV: unexpected end of data, in line 2"),
        ("a.csv", b"prompt\n1\n\xfc\n", "must be UTF-8 text (line 3 is not)"),
        ("a.csv", b"", "holds no rows"),
        ("a.json", b'[{"prompt": "a"}, 3]', "row 2: spec.dataset.path: must be an object"),
        ("a.json", b'[{"prompt": "a"},\n]', "is not JSON: "),
        ("a.jsonl.gz", b"prompt", "is not a complete gzip file: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], "is not a complete gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n[]', mtime=0), "line 2: spec.dataset.path: must be an object"),
        ("a.tsv", b"prompt\n1", "must be a .jsonl, .json or .csv file"),
    ],
)
def test_a_malformed_file_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError) as refused:
        load_rows(Dataset(path=str(tmp_path / name)))
    assert problem in str(refused.value)


def test_columns_of_any_type_break_nothing(tmp_path: Path) -> None:
    day, noon = date(2030, 1, 2), datetime(2030, 1, 2, 12, tzinfo=UTC)
    table: dict[str, Any] = {
        "prompt": ["1+1="], "day": [day], "noon": [noon], "price": [Decimal("1.50")], "score": [float("nan")],
        "image": [b"PNG"], "nested": [{"parts": [{"day": day, "raw": b"x"}], "took": timedelta(seconds=1)}],
        "far": pyarrow.array([10**15], pyarrow.timestamp("s")),
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    rows = load_rows(Dataset(path=str(tmp_path / "rows.parquet")))
    prompts = Prompts(rows, hugging_face_tokenizer(), Dataset(path="d"), seed=0, prompts_per_step=1)
    columns = json.loads(prompts[0].columns_json)
    assert columns == {
        "day": "2030-01-02", "noon": "2030-01-02T12:00:00+00:00", "price": "1.50", "score": None,
        "nested": {"parts": [{"day": "2030-01-02"}], "took": "0:00:01"},
    }  # fmt: skip
    assert set(columns) == set(prompts.columns)


def test_images_are_not_decoded(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "picture": [{"bytes": b"no picture", "path": None}]})
    rows.cast_column("picture", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    assert list(load_rows(Dataset(path=str(tmp_path / "saved"))).records[0]) == ["prompt"]


def test_a_lone_surrogate_in_a_column_is_kept() -> None:
    prompts = prompts_of([{"prompt": "a", "note": "\ud83d", "ü": "ü"}] * 2)
    prompts[0].columns_json.encode()
    assert json.loads(prompts[0].columns_json) == {"note": "\ud83d", "ü": "ü"}


def test_a_prompt_column_of_another_name_reaches_the_rewards() -> None:
    prompts = prompts_of([{"question": "1+1=", "answer": 2}] * 2, promptColumn="question")
    assert json.loads(prompts[0].columns_json) == {"question": "1+1=", "answer": 2}
    assert prompts.columns == {"question": "", "answer": ""}


def test_columns_name_the_first_row_that_lacks_them() -> None:
    records = [{"prompt": "a", "x": 1}, {"prompt": "b" * 600}, {"prompt": "c", "y": 1}, {"prompt": "d", "x": 1, "y": 1}]
    assert prompts_of(records).columns == {"x": "row 3", "y": "row 1"}


def test_a_wrong_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = str(write_folder(tmp_path))
    assert len(load_rows(Dataset(path=path, split="test"))) == 2
    with pytest.raises(JobError, match=r"spec\.dataset\.split: must be one of train, test"):
        load_rows(Dataset(path=path, split="tset"))


def test_an_unavailable_hub_dataset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(JobError, match="neither a file beside the job nor a hub dataset"):
        load_rows(Dataset(path="no-such-owner/no-such-data"))


def test_a_line_is_counted_with_the_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n\n{"prompt": 3}\n')
    assert load_rows(Dataset(path="rows.jsonl"), tmp_path).where(1) == "line 4"


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[]\n" * 1000)
    with pytest.raises(JobError) as caught:
        load_rows(Dataset(path="rows.jsonl"), tmp_path)
    assert len(caught.value.problems) == 11
    assert "990 more" in str(caught.value)


def test_a_wrong_column_name_is_one_problem_and_a_missing_value_one_a_row() -> None:
    records = [{"prompt": "a"}, {"question": "b"}, {"question": "c"}]
    for column, num_problems in (("qestion", 1), ("question", 1), ("prompt", 2)):
        with pytest.raises(JobError) as refused:
            prompts_of(records, promptColumn=column)
        assert len(refused.value.problems) == num_problems, column


def test_a_prompt_is_tokenized_as_the_engine_does() -> None:
    row = prompts_of(RECORDS)[2]
    assert row.text == "2+1="
    assert row.token_ids == (BOS, *encode("2+1=")) == tuple(hugging_face_tokenizer().encode("2+1="))
    assert json.loads(row.columns_json) == {"answer": 3, "tags": ["sum", {"digits": 1}]}


def test_messages_go_through_the_template_without_a_second_start() -> None:
    tokenizer = hugging_face_tokenizer()
    tokenizer.chat_template = CHAT
    records = [{"chat": [{"role": "user", "content": "hi"}], "answer": "x"}] * 2
    row = prompts_of(records, tokenizer, messagesColumn="chat")[0]
    assert row.text == "<user>hi<a>"
    assert row.token_ids == tuple(encode("<user>hi<a>"))
    assert json.loads(row.columns_json) == {"answer": "x", "chat": records[0]["chat"], "messages": records[0]["chat"]}


def test_a_template_that_refuses_is_named_with_its_row() -> None:
    tokenizer = hugging_face_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(JobError, match=r"row 1: spec\.dataset\.messagesColumn: .*only users"):
        prompts_of([{"chat": [{"role": "user", "content": "hi"}]}], tokenizer, messagesColumn="chat")


def test_prompts_that_become_no_token_name_who_made_them_so() -> None:
    tokenizer = hugging_face_tokenizer()
    chat = [{"chat": [{"role": "user", "content": "hi"}]}]
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(JobError, match=r"messagesColumn: the chat template produces no token for any of the 1 prompts"):
        prompts_of(chat, tokenizer, messagesColumn="chat")
    tokenizer.chat_template = ""
    with pytest.raises(JobError, match=r"messagesColumn: the tokenizer has no chat template"):
        prompts_of(chat, tokenizer, messagesColumn="chat")


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama"])
def test_a_folder_without_tokenizer_files_is_no_tokenizer(tmp_path: Path, kind: str) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=r"spec\.model\.path: (its tokenizer has no vocabulary|no tokenizer can)"):
        load_tokenizer(Model(path=str(tmp_path)))


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """The vocabulary and the chat template's tokens are checked at once; other tokens may lie beyond."""
    tokenizer = hugging_face_tokenizer()
    tiny_config("llama", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "model")
    tiny_config("llama", vocab_size=200).save_pretrained(tmp_path / "small")
    model = Model(path=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{number}>" for number in range(9)]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert len(load_tokenizer(model)) > VOCAB_SIZE
    said = rf"spec\.model\.tokenizer: its tokens have ids up to {tokenizer.vocab_size - 1}, "
    said += r"but .* embedding has 200 rows"
    with pytest.raises(InvalidRequest, match=said):
        load_tokenizer(model.model_copy(update={"path": str(tmp_path / "small")}))
    tokenizer.chat_template = "<8>{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(InvalidRequest, match=rf"ids up to {len(tokenizer) - 1}, but .*embedding has {VOCAB_SIZE} rows"):
        load_tokenizer(model)


def test_long_prompts_are_left_out_and_counted() -> None:
    records = [{"prompt": "x" * length} for length in (1, 9, 3, 10, 8)]
    prompts = prompts_of(records, maxPromptTokens=9)  # BOS counts
    assert (len(prompts), prompts.num_too_long) == (3, 2)
    assert [len(prompts[index].text) for index in range(3)] == [1, 3, 8]


def test_take_numbers_the_prompts_across_rounds() -> None:
    prompts = prompts_of(RECORDS)
    assert [place for place, _ in prompts.take(step=1)] == [0, 1]
    assert [place for place, _ in prompts.take(step=1, round=2, count=1)] == [4]
    assert len({row.text for round in range(3) for _, row in prompts.take(step=1, round=round)}) == 6


def test_the_tokenizer_beside_the_policy_is_loaded(tmp_path: Path) -> None:
    hugging_face_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(Model(path=str(tmp_path))).encode("a") == [BOS, 97]
    with pytest.raises(InvalidRequest, match=r"spec\.model\.tokenizer: no tokenizer can be loaded"):
        load_tokenizer(Model(path=str(tmp_path), tokenizer=str(tmp_path / "none")))


orders = st.builds(
    Order, num_rows=st.integers(1, 40), prompts_per_step=st.integers(1, 12), seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)  # fmt: skip


@given(orders, st.integers(1, 5))
def test_an_epoch_takes_every_row_once(order: Order, epoch: int) -> None:
    taken = [row for step in range(1, 5 + epoch * order.num_rows) for row in order.indices(step)]
    start = (epoch - 1) * order.num_rows
    assert sorted(taken[start : start + order.num_rows]) == list(range(order.num_rows))


@given(orders, st.permutations([(step, round) for step in (1, 2, 7) for round in (0, 1, 2)]))
def test_the_order_is_a_function_of_seed_step_and_round(old: Order, asked: list[tuple[int, int]]) -> None:
    """Earlier calls do not matter, and fewer prompts are a prefix of more."""
    for step, round in asked:
        fresh = Order(num_rows=old.num_rows, prompts_per_step=old.prompts_per_step, seed=old.seed, shuffle=old.shuffle)
        assert old.indices(step, round) == fresh.indices(step, round)
        assert old.indices(step, round, 1) == fresh.indices(step, round)[:1]


@given(orders, st.integers(1, 9))
def test_a_step_repeats_no_row_while_there_are_others(order: Order, step: int) -> None:
    own = order.indices(step)
    demanded = [row for round in range(1, 5) for row in order.indices(step, round)]
    num_others = order.num_rows - len(set(own))
    others = demanded[:num_others]
    assert len(set(others)) == len(others)
    assert not set(others) & set(own)


def test_seeds_and_epochs_differ() -> None:
    def first(seed: int, step: int = 1) -> list[int]:
        return Order(num_rows=100, prompts_per_step=100, seed=seed).indices(step)

    assert first(1) != first(2)
    assert first(1) != first(1, step=2)
    assert Order(num_rows=4, prompts_per_step=3, seed=1, shuffle=False).indices(2) == [3, 0, 1]


def test_the_order_of_rows_never_changes_between_releases() -> None:
    """A resumed run may have newer libraries, so these numbers must never change."""
    order = Order(num_rows=10, prompts_per_step=4, seed=11)
    assert order.indices(1) == [1, 5, 6, 9]
    assert order.indices(3) == [7, 2, 0, 9]
    assert order.indices(1, round=1, count=3) == [2, 7, 4]


def test_a_dataset_that_ends_says_after_which_step() -> None:
    order = Order(num_rows=10, prompts_per_step=4, seed=0, epochs=1)
    order.indices(2)
    order.indices(2, round=3)  # replacements are no part of the epoch
    with pytest.raises(DataExhausted, match="ended after step 2: 10 prompts, 1 epochs") as caught:
        order.indices(3)
    assert caught.value.last_step == order.last_step == num_steps(10, 4, 1) == 2


def test_an_impossible_step_or_count_is_refused() -> None:
    order = Order(num_rows=10, prompts_per_step=4, seed=0)
    for step, round, count in ((0, 0, 1), (1, -1, 1), (1, 0, 5)):
        with pytest.raises(InvalidRequest):
            order.indices(step, round, count)
    with pytest.raises(InvalidRequest, match="fewer than the first step needs"):
        Order(num_rows=3, prompts_per_step=4, seed=0, epochs=1)
