"""The run folder has whole lines, resumes after any kill, and admits one run of its own job."""

import functools
import json
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_records import example_evaluation
from hypothesis import given, settings, strategies as st
from places import ROOT
from run_folders import a_run, begin, example_job, example_sample, reward_of, write_steps
from sweeps import examples
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.errors import InvalidRequest, NumericalError, RolloutError, StorageError
from rlhfspec.job import RLHFJob, Spec
from rlhfspec.job.block import Mark, marked
from rlhfspec.job.file.yaml_text import parts_of
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import CURVE, MEASUREMENTS, Lengths, Spread, StepMetrics, curve, example_step
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.folder.same_job import as_content, with_new_fields
from rlhfspec.runs.folder.sample_lines import by_column, evaluation_of, sample_line
from rlhfspec.runs.view.summary import facts

floats = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(
    st.lists(floats, min_size=1, max_size=5),
    floats,
    st.none() | st.fixed_dictionaries({"k3": floats}),
    st.dictionaries(st.text(max_size=5), floats, max_size=3),
)
@examples(15, whole=60)
def test_metrics_keep_their_bits_in_a_line(
    rewards: list[float], loss: float, kl: dict[str, float] | None, parts: dict[str, float]
) -> None:
    spread = Spread(mean=rewards[0], std=abs(rewards[0]), min=min(rewards), max=max(rewards))
    metrics = replace(example_step(), reward=spread, policy_loss=loss, kl=kl, reward_components=parts)
    line = metrics.to_line()
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert repr(StepMetrics.from_line(line)) == repr(metrics)
    assert list(json.loads(line)) == [field.name for field in fields(StepMetrics)]


def test_every_field_is_curve_or_measurement() -> None:
    assert {*CURVE} | MEASUREMENTS == {field.name for field in fields(StepMetrics)}
    assert not {*CURVE} & MEASUREMENTS
    slower = replace(example_step(), tokens_per_second=1.0, strategy={"plain": 1}, finished_unix_seconds=9.0)
    assert curve(slower.to_line()) == curve(example_step().to_line())
    assert curve(replace(example_step(), grad_norm=0.8 + 1e-16).to_line()) != curve(example_step().to_line())


@pytest.mark.parametrize(("field", "default"), [("expert_rows", {}), ("equal_reward_groups", None)])
def test_a_field_missing_in_an_older_line_gets_its_default(field: str, default: Any) -> None:
    content = json.loads(example_step().to_line())
    del content[field]
    assert StepMetrics.from_line(json.dumps(content)) == replace(example_step(), **{field: default})


@given(st.permutations([0.1, 0.7, 1e-9, 123456.5, -3.25, 1 / 3]))
def test_spread_does_not_depend_on_the_order(values: list[float]) -> None:
    assert Spread.of(values) == Spread.of(sorted(values))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(100, 5000))
def test_the_histogram_counts_every_length_once(lengths: list[int], max_tokens: int) -> None:
    told = Lengths.of(lengths, max_tokens=max_tokens)
    assert sum(told.histogram) == len(lengths)
    assert len(told.histogram) == len(told.edges) - 1
    assert told.edges[-1] == max_tokens
    assert told.min <= told.p50 <= told.p95 <= told.max
    assert sum(length <= told.p95 for length in lengths) >= 0.95 * len(lengths)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(value: float) -> None:
    metrics = replace(example_step(step=7), reward_components={"exact": value})
    with pytest.raises(NumericalError, match=r"step 7: reward_components\.exact is (nan|inf)"):
        metrics.to_line()


@pytest.mark.parametrize("line", ["", "{", "[]", '{"step": 1}', example_step().to_line().replace('"kl"', '"lk"')])
def test_a_foreign_line_is_refused(line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"steps\.jsonl"):
        StepMetrics.from_line(line)


def test_a_folder_holds_what_was_appended(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "deep" / "run", 3)
    assert folder.steps() == [example_step(step=step) for step in (1, 2, 3)]
    assert [line["id"] for line in folder.samples()][:4] == [f"sums/1/{prompt}/0" for prompt in (0, 1, 2, 10)]
    assert folder.job() == example_job()
    manifest = folder.manifest()
    assert manifest.outcome == "running"
    assert manifest.versions["rlhfspec"]
    assert manifest.machine.num_cores >= 1
    folder.finish("failed", "reward source exact failed")
    assert folder.manifest().reason == "reward source exact failed"
    assert folder.manifest().num_steps == 3


def test_sample_lines_do_not_depend_on_arrival_or_drafting() -> None:
    sample = example_sample()
    drafted = replace(sample, num_verifications=9, num_drafted=40, num_accepted=20, generator="another")
    assert sample_line(sample, reward_of(sample)) == sample_line(drafted, reward_of(drafted))


def test_a_failed_reward_is_null_and_says_why() -> None:
    sample = example_sample()
    told = json.loads(sample_line(sample, reward_of(sample, error="HTTP 500")))
    assert told["reward"] is None
    assert told["error"] == "HTTP 500"
    assert told["components"] == {}
    assert json.loads(sample_line(sample, None))["reward"] is None


@given(st.text() | st.just("half \ud800 a pair"))
def test_any_text_fits_in_one_sample_line(text: str) -> None:
    line = sample_line(example_sample(text=text), None)
    assert line.count("\n") == 1
    assert json.loads(line.encode())["text"] == text


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    a_run(tmp_path)
    before = (tmp_path / "steps.jsonl").read_bytes(), (tmp_path / "samples.jsonl").read_bytes()
    with RunFolder(tmp_path) as folder:
        opening = begin(folder, example_job(), resume=True, resume_at=3)
        assert (opening.resumed, opening.num_dropped_steps, opening.num_dropped_samples) == (True, 2, 8)
        assert opening.missing_steps == ()
        assert [metrics.step for metrics in folder.steps()] == [1, 2, 3]
        write_steps(folder, range(4, 6))
        assert [entry.step for entry in folder.manifest().resumed] == [3]
    assert (folder.steps_file.read_bytes(), folder.samples_file.read_bytes()) == before


@given(data=st.data())
@settings(max_examples=25)
def test_resume_after_kill_at_any_byte(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Resuming from an earlier checkpoint gives the same two files; a torn line is not read."""
    path = tmp_path_factory.mktemp("run")
    a_run(path, 3)
    whole = {name: (path / name).read_bytes() for name in ("steps.jsonl", "samples.jsonl")}
    for name, content in whole.items():
        num_last = 1 if name == "steps.jsonl" else 4
        start_of_last = len(b"".join(content.splitlines(True)[:-num_last]))
        (path / name).write_bytes(content[: data.draw(st.integers(start_of_last, len(content)), name)])
    steps = (path / "steps.jsonl").read_bytes()
    with RunFolder(path) as folder:
        assert len(folder.steps()) == steps.count(b"\n")
        opening = begin(folder, example_job(), resume=True, resume_at=2)
        assert (opening.missing_steps, opening.num_dropped_steps) == ((), len(steps.splitlines()) - 2)
        write_steps(folder, range(3, 4))
    assert {name: (path / name).read_bytes() for name in whole} == whole


def test_evaluations_are_kept_up_to_the_step_that_is_resumed_at(tmp_path: Path) -> None:
    runs = [example_evaluation(step=step) for step in (0, 2, 4)]
    with a_run(tmp_path, 4) as folder:
        for run in runs:
            folder.append_evaluation(run)
        with pytest.raises(AssertionError, match="after step 4 there was an evaluation"):
            folder.append_evaluation(runs[2])
        with folder.evaluations_file.open("a") as file:
            file.write('{"step": 5')
        assert folder.evaluations() == runs, "a line that is being written is not seen"
    with RunFolder(tmp_path) as folder:
        begin(folder, example_job(), resume=True, resume_at=3)
        assert folder.evaluations() == runs[:2]
        folder.append_evaluation(runs[2])
        assert folder.evaluations() == runs


def test_runs_are_compared_on_held_out_prompts_where_all_were_evaluated(tmp_path: Path) -> None:
    for name, rewards in (("a", (0.25, 0.75, 0.5)), ("b", (0.125, 0.25, 0.375))):
        folder = a_run(tmp_path / name, 2)
        unmeasured = replace(example_step(step=3), kl=None, tokens_per_second=None)
        folder.steps_file.write_text("".join(line.to_line() for line in (*folder.steps(), unmeasured)))
        for step, reward in enumerate(rewards):
            folder.append_evaluation(example_evaluation(step=step, reward=reward))
    command, picture = ["compare", str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "curves.png"
    told = CliRunner().invoke(app, [*command, "--plot", str(picture)]).stdout
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in told.splitlines() if row.startswith("│")]
    ends = ["-", "27.5", "1,234"]  # the last KL; speed where it was measured
    assert [row[5:10] for row in rows] == [["0.750", "1", *ends], ["0.375", "2", *ends]], "the best and its step"
    assert picture.exists()
    folder.evaluations_file.unlink()
    assert "held-out" in told
    assert "held-out" not in CliRunner().invoke(app, command).stdout


def test_compare_warns_of_a_collapse(tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / name, 2)
    for step, different in ((0, 60.0), (2, 4.0)):
        run = replace(example_evaluation(step=step), num_samples=120, different_answers=different)
        RunFolder(tmp_path / "b").append_evaluation(run)
    told = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")]).stdout
    assert "b: the policy collapses: 4.00 effectively different held-out answers after step 2, 60.0 after" in told
    assert "a: " not in told
    assert "held-out, best" not in told, "a was not evaluated"


def test_an_evaluation_counts_scored_and_failed_samples() -> None:
    samples = [example_sample(step=7, prompt=prompt, log_probs=[-0.5] * (prompt + 1)) for prompt in range(4)]
    samples[1] = replace(samples[1], finish_reason="length")
    rewards = {samples[0].id: reward_of(samples[0], 0.0), samples[1].id: reward_of(samples[1], 1.0)}
    rewards[samples[2].id] = reward_of(samples[2], error="TypeError")
    told = evaluation_of(7, 7, samples, rewards, max_tokens=8, seconds=1.5)
    assert (told.num_samples, told.num_failed, told.truncated_fraction) == (2, 2, 0.5)
    assert told.reward == Spread(mean=0.5, std=0.5, min=0.0, max=1.0)
    assert (told.reward_components, told.response_length.mean) == ({"exact": 0.5}, 1.5)
    assert Evaluation.from_line(told.to_line()) == told
    with pytest.raises(RolloutError, match="has no reward, nor has any sample of the evaluation after step 7"):
        evaluation_of(7, 7, samples, {}, max_tokens=8, seconds=1.5)


def test_an_evaluation_counts_different_answers_and_the_expected_ones() -> None:
    rows = (("1", 3), (" 1\n", 4), ("2", "3"), ("2", 3))
    samples = [
        replace(example_sample(step=7, prompt=place), text=text, columns_json=json.dumps({"answer": answer}))
        for place, (text, answer) in enumerate(rows)
    ]
    rewards = {each.id: reward_of(each) for each in samples}
    told = evaluation_of(7, 7, samples, rewards, max_tokens=8, seconds=1.5)
    assert told.different_answers == 2.0, "a text without the space around it"
    assert told.expected_answers == pytest.approx(4 / 3**0.75), "3, 4, 3, 3"
    without = [replace(each, columns_json="{}") for each in samples]
    assert evaluation_of(7, 7, without, rewards, max_tokens=8, seconds=1.5).expected_answers is None


def test_a_line_that_lacks_only_its_end_is_torn(tmp_path: Path) -> None:
    """Otherwise the next line would be appended to it."""
    folder = a_run(tmp_path, 2)
    folder.steps_file.write_bytes(folder.steps_file.read_bytes()[:-1])
    with RunFolder(tmp_path) as again:
        opening = begin(again, example_job(), resume=True, resume_at=2)
        assert (opening.num_dropped_steps, opening.missing_steps) == (0, (2,)), "it is lost, not done again"
        again.append_step(example_step(step=3))
        assert [metrics.step for metrics in again.steps()] == [1, 3]


def test_missing_step_lines_are_reported(tmp_path: Path) -> None:
    a_run(tmp_path, 3)
    with RunFolder(tmp_path) as folder:
        assert begin(folder, example_job(), resume=True, resume_at=5).missing_steps == (4, 5)
        folder.append_step(example_step(step=6))


DAMAGES = {"other bytes": lambda line: b"\x00\xff\xfe" + line[3:], "cut": lambda line: line[:40] + b"\n"}
DAMAGES |= {"of another kind": lambda line: b"[1, 2]\n", "empty": lambda line: b"\n"}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("resume_at", [4, 6])
def test_one_damaged_line_costs_no_other(tmp_path: Path, damage: Any, resume_at: int) -> None:
    """One line of step 3 is damaged in both files; steps 4 to 6 are neither lost nor reported as repeated."""
    folder = a_run(tmp_path, 6)
    for file, place in ((folder.steps_file, 2), (folder.samples_file, 9)):
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([*lines[:place], damage(lines[place]), *lines[place + 1 :]]))
    whole = folder.steps_file.read_bytes().splitlines()
    with RunFolder(tmp_path) as again:
        opening = begin(again, example_job(), resume=True, resume_at=resume_at)
        assert (opening.missing_steps, opening.num_dropped_steps) == ((3,), 6 - resume_at)
        assert (opening.num_damaged_samples, opening.num_dropped_samples) == (1, 4 * (6 - resume_at))
        assert again.steps_file.read_bytes().splitlines() == [whole[n - 1] for n in range(1, resume_at + 1) if n != 3]
        assert sum(1 for _ in again.samples()) == 4 * resume_at - 1
        write_steps(again, range(resume_at + 1, 8))
        assert [metrics.step for metrics in again.steps()] == [1, 2, 4, 5, 6, 7]
    told = "\n".join(opening.told())
    assert "steps.jsonl lacks steps 3: the curve has a gap there" in told
    assert "samples.jsonl: 1 damaged lines were left out" in told
    assert ("done again" in told) == (resume_at < 6)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"job": 3}', '{"machine": {}, "resumed": []}', "\udcff"])
def test_a_damaged_manifest_is_one_line_and_begun_anew(tmp_path: Path, content: str) -> None:
    folder = a_run(tmp_path, 2)
    (tmp_path / "plots").mkdir()
    folder.manifest_file.write_text(content, errors="surrogateescape")
    with pytest.raises(StorageError, match=r"manifest\.json: cannot be read"):
        folder.manifest()
    with RunFolder(tmp_path) as again:
        assert begin(again, example_job(), resume=True, resume_at=2).resumed
        again.finish("completed")
    assert (folder.manifest().outcome, folder.manifest().num_steps) == ("completed", 2)
    assert [entry.step for entry in folder.manifest().resumed] == [2]


@pytest.mark.parametrize("content", ["", "3", "[", "- a", "\udcff: 1"])
def test_a_damaged_job_file_of_a_run_is_one_line(tmp_path: Path, content: str) -> None:
    a_run(tmp_path, 2).job_file.write_text(content, errors="surrogateescape")
    with pytest.raises(InvalidRequest, match=r"job\.yaml: cannot be read"):
        RunFolder(tmp_path).check(example_job(), resume=True)


@pytest.mark.parametrize("out", ["/proc/run", "/proc/a/b", "/proc", "file", "file/below"])
def test_an_output_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    for first in (RunFolder(tmp_path / out).check, RunFolder(tmp_path / out).begin):
        with pytest.raises(InvalidRequest, match=r"--out: cannot be (made|written)"):
            first(example_job(), resume=False)


def test_a_step_out_of_order_raises_an_assertion_error(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        begin(folder, example_job(), resume=False)
        with pytest.raises(AssertionError, match="step 2 follows step 0"):
            folder.append_step(example_step(step=2))


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    a_run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidRequest, match="--out: holds a run of this job; add --resume"):
        begin(RunFolder(tmp_path), example_job(), resume=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("others", [("thesis.tex",), ("job.yaml", "rewards.py")], ids=["else", "the jobs own folder"])
def test_a_folder_that_holds_no_run_is_not_overwritten(tmp_path: Path, others: tuple[str, ...]) -> None:
    for name in others:
        (tmp_path / name).write_text(yaml.safe_dump(as_content(example_job())) if name == "job.yaml" else "")
    for resume in (False, True):
        with pytest.raises(InvalidRequest, match=f"must be empty or hold a run; it holds {others[-1]}"):
            begin(RunFolder(tmp_path), example_job(), resume=resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*others]


def test_resume_begins_a_run_in_an_empty_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "new") as folder:
        assert not begin(folder, example_job(), resume=True).resumed


def test_a_run_that_could_not_begin_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.begin(example_job(), resume=False)
        folder.discard()
    assert not folder.path.exists()
    with RunFolder(tmp_path / "run") as folder:
        folder.begin(example_job(), resume=False)
        folder.finish("stopped", "Ctrl-C")
    before = {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    with RunFolder(folder.path) as again:
        again.begin(changed("spec.training.optimizer.learningRate", 1e-3), resume=True)
        assert again.manifest().outcome == "running"
        again.discard()
    assert {path.name: path.read_bytes() for path in folder.path.iterdir() if path.is_file()} == before


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        begin(folder, example_job(), resume=False)
        with pytest.raises(InvalidRequest, match="another run is writing here"):
            begin(RunFolder(tmp_path), example_job(), resume=True)
    with RunFolder(tmp_path) as folder:
        assert begin(folder, example_job(), resume=True).resumed


def holder_of(content: Any, path: str) -> tuple[Any, Any]:
    *way, last = parts_of(path)
    return functools.reduce(lambda holder, key: holder[key], way, content), last


def changed(path: str, value: Any, **training: Any) -> RLHFJob:
    content = as_content(example_job(steps=5, **training))
    holder, last = holder_of(content, path)
    holder[last] = value
    return RLHFJob.model_validate(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.training.seed", 1),
        ("spec.algorithm.clipHigh", 0.3),
        ("spec.model.path", "another"),
        ("spec.generation.temperature", 0.5),
        ("spec.rewards.sources[0].weight", 2.0),
        ("spec.rewards.sources[0].function", "rewards:another"),
        ("metadata.name", "another"),
    ],
)
def test_another_job_is_refused_by_its_field(tmp_path: Path, path: str, value: Any) -> None:
    a_run(tmp_path, steps=5)
    for resume in (True, False):
        with pytest.raises(InvalidRequest) as refused:
            begin(RunFolder(tmp_path), changed(path, value), resume=resume, resume_at=2)
        assert path in str(refused.value)
        assert repr(value) in str(refused.value)
    assert len(RunFolder(tmp_path).steps()) == 5


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.generation.speculation.mode", "off"),
        ("spec.roles.reward.workers", 2),
        ("spec.observability.view", "plain"),
        ("spec.checkpoint.keep", 5),
        ("spec.rewards.sources[0].retries", 9),
        ("metadata.labels", {"team": "a"}),
    ],
)
def test_fields_without_influence_on_the_curve_may_differ_at_resume(tmp_path: Path, path: str, value: Any) -> None:
    a_run(tmp_path, steps=5)
    with RunFolder(tmp_path) as folder:
        assert begin(folder, changed(path, value), resume=True, resume_at=5).resumed
    assert folder.job() == changed(path, value)


def judged(url: str, **headers: str) -> RLHFJob:
    content = as_content(example_job())
    content["spec"]["rewards"]["sources"] = [{"type": "http", "url": url, "headers": headers}]
    return RLHFJob.model_validate(content)


@pytest.mark.parametrize(
    ("job", "private"),
    [
        (judged("http://host/", key="s3cr3t"), True),
        (judged("http://me:s3cr3t@host/"), True),
        (judged("http://host/?key=s3cr3t"), True),
        (judged("http://me:s3cr3t@${HOST}/"), True),
        (judged("http://s3cr3t@host/"), True),
        (judged("http://me:${PASSWORD}@host/"), False),
        (judged("http://host/?key=${KEY}", key="Bearer ${KEY}"), False),
        (example_job(), False),
    ],
)
def test_a_job_with_secrets_is_for_its_owner_alone(tmp_path: Path, job: RLHFJob, private: bool) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin(job, resume=False)
        assert folder.job() == job, "references are kept as they are"
    assert (stat.S_IMODE(folder.job_file.stat().st_mode) == 0o600) is private


def test_a_secret_that_comes_back_is_for_its_owner_alone(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin(judged("http://host/", key="s3cr3t"), resume=False)
        folder.finish("stopped", "Ctrl-C")
    with RunFolder(tmp_path) as again:
        again.begin(judged("http://host/", key="${KEY}"), resume=True)
        assert stat.S_IMODE(again.job_file.stat().st_mode) != 0o600
        again.discard()
    assert "s3cr3t" in again.job_file.read_text()
    assert stat.S_IMODE(again.job_file.stat().st_mode) == 0o600


def test_the_job_that_differs_tells_no_secret(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.begin(judged("http://me:s3cr3t@one/"), resume=False)
    for other in (judged("http://me:s3cr3t@two/?s3cr3t", key="s3cr3t"), example_job()):
        with pytest.raises(InvalidRequest, match="holds the run of another job") as refused:
            RunFolder(tmp_path).check(other, resume=True)
        assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [("training.optimizer.learningRate", 1e-7), ("algorithm.klCoefficient", 0.5), ("training.steps", 50)],
)
def test_a_change_of_the_curve_at_resume_is_recorded(tmp_path: Path, path: str, value: Any) -> None:
    schedule = {"name": "cosine"}
    holder, last = holder_of(as_content(a_run(tmp_path, steps=5, schedule=schedule).job()), f"spec.{path}")
    old, job = holder[last], changed(f"spec.{path}", value, schedule=schedule)
    with RunFolder(tmp_path) as folder:
        opening = begin(folder, job, resume=True, resume_at=3)
        assert f"spec.{path} is {value} from here on; it was {old}" in list(opening.told())
        [resumption] = folder.manifest().resumed
        assert (resumption.step, resumption.changed) == (3, {f"spec.{path}": (old, value)})
        folder.go_on_after(4)  # a trainer that is restarted
        assert folder.manifest().resumed == (resumption,)
    assert folder.job() == job


@given(
    st.text(max_size=8)
    | st.sampled_from(["1e-6", "off", "010", "2024-01-01", "1_000", "~", "", "0x1F", "=", "1:30", "0E0", "1e6", ".5"])
)
@settings(max_examples=40)
def test_the_job_reads_back_from_the_folder_unchanged(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """The folder reads it, and so does the job reader, as it is a job file."""
    from rlhfspec.job.file.yaml_text import parse

    job = example_job(optimizer={"name": "AdamW", "arguments": {"text": text, "eps": 1e-8, "betas": [0.9, 0.999]}})
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        begin(folder, job, resume=False)
        assert folder.job() == job
        written = folder.job_file.read_text()
    assert yaml.safe_load(written) == parse(written, source="job.yaml").value == as_content(job)


def test_the_document_lists_every_field_and_its_kind() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    listed = [tuple(r.split(" | ")[:2]) for r in text.splitlines() if r.count(" | ") == 2 and r.startswith("| `")]
    kinds = [(f"| `{x.name}`", "measurement" if x.name in MEASUREMENTS else "curve") for x in fields(StepMetrics)]
    assert listed == kinds
    sample = json.loads(sample_line(example_sample(), None))
    for file, keys in (("samples", list(sample)), ("evaluations", [field.name for field in fields(Evaluation)])):
        rows = [row for row in text.split(f"## {file}.jsonl")[1].split("## ")[0].splitlines() if row.startswith("| `")]
        assert [name.strip(" `") for row in rows for name in row.split("|")[1].split(",")] == keys


@pytest.mark.parametrize("block", ["generation", "training", "checkpoint", "observability"])
def test_a_field_missing_in_an_older_job_counts_as_its_default(tmp_path: Path, block: str) -> None:
    """This holds for every block whose fields all have defaults."""
    with RunFolder(tmp_path) as folder:
        folder.begin(example_job(), resume=False)
    for field in as_content(example_job())["spec"][block]:
        content = as_content(example_job())
        del content["spec"][block][field]
        folder.job_file.write_text(yaml.safe_dump(content))
        RunFolder(tmp_path).check(example_job(), resume=True)  # raises, where it is of another


CHANGED: dict[str, Any] = {
    "suspend": True, "activeDeadlineSeconds": 7200, "preRunningDeadlineSeconds": 60, "ttlSecondsAfterFinished": 9,
    "deletionPolicy": {"failed": "delete"}, "restart": {"id": "2"}, "workers": 3, "replicas": {"min": 1, "max": 8},
    "resources": {"limits": {"cpu": 2}}, "image": "other", "podTemplate": {"metadata": {"labels": {"team": "other"}}},
    "gateway.workers": 1, "tokenSecret": "other",
}  # fmt: skip


@pytest.mark.parametrize("path", [*marked(Spec, Mark.MUTABLE), *marked(Spec, Mark.MUTABLE_WHILE_SUSPENDED)])
def test_a_run_goes_on_whichever_mutable_field_changed(tmp_path: Path, path: str) -> None:
    known = path.removeprefix("roles.") if path.removeprefix("roles.") in CHANGED else path.rpartition(".")[2]
    before, after = example_job(steps=5), changed(f"spec.{path}", CHANGED[known])
    assert before != after
    for job in (before, after):
        with RunFolder(tmp_path) as folder:
            folder.begin(job, resume=True)
    assert folder.manifest().resumed, "it is the same run"


def test_a_job_that_this_release_cannot_read_is_compared_unchanged() -> None:
    assert with_new_fields({"spec": {"gone": 1}}) == {"spec": {"gone": 1}}


def test_rewards_are_averaged_by_a_column_of_the_data() -> None:
    columns = [json.dumps({"task": task}) for task in ("sum", "sum", "spell", 3)]
    samples = [replace(example_sample(prompt=place), columns_json=each) for place, each in enumerate(columns)]
    rewards = {each.id: reward_of(each, float(place)) for place, each in enumerate(samples)}
    found = by_column("task", samples, rewards)
    means, nums = {"3": 3.0, "spell": 2.0, "sum": 0.5}, {"3": 1.0, "spell": 1.0, "sum": 2.0}
    assert found == {"reward_by_column": means, "num_by_column": nums}
    evaluation = evaluation_of(7, 7, samples, rewards, max_tokens=8, seconds=1.5, column="task")
    assert Evaluation.from_line(evaluation.to_line()) == evaluation
    assert evaluation.num_by_column == found["num_by_column"]
    rows = dict(facts([replace(example_step(step=step), **found) for step in (1, 2)]))
    assert rows["reward, sum"] == "0.500 -> 0.500, 4 samples"
    assert not by_column(None, samples, rewards)["num_by_column"]
