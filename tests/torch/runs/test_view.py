"""Live view and plain lines: their content fits, and model output cannot control the terminal."""

import io
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from counting import counting_calls
from example_records import example_evaluation, example_score
from hypothesis import example, given, settings, strategies as st
from rich.cells import cell_len
from rich.console import Console
from run_folders import example_job, example_sample
from views import Hand, a_full_view, a_view, load, picture, process, tell, terminal, written

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.records import Load
from rlhfspec.messages.records.metrics import StepMetrics, example_step
from rlhfspec.messages.records.models import Drafting
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.progress import RunProgress
from rlhfspec.runs.view.summary import summarize
from rlhfspec.runs.view.text import histogram, sparkline, visible
from rlhfspec.runs.view.view import print_line, step_line
from rlhfspec.training.checkpoint import CheckpointStore

DRAFTING = Drafting(
    drafter="model", acceptance=(0.95, 0.9), level_share=0.42, num_verifications=100, num_tokens=282, saved_seconds=8.0
)
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \x00 \x08\x08 \r \u202e \u2028 \u2029 [red]not markup[/red] :smile: \ud800"


def test_the_live_view_shows_all_numbers_of_the_run() -> None:
    console = terminal()
    text = "\n".join(picture(a_full_view(console), console))
    for said in (
        "sums", "grpo", "step 13/60", "1/128 samples", "ETA 3m02s", "0.600", "+0.550 since step 1", "0.0120", "27.5",
        "p95 60", "0.500", "entropy 1.50", "1,834", "2.31 accepted per verification", "suffix 1x4", "3.1e-07",
        "generator", "48%", "12+34 ↵ =46 of reference", "sums/13/0/0", "Ctrl-C",
    ):  # fmt: skip
        assert said in text, said
    assert sparkline([step / 20 for step in range(1, 13)], 32) in text
    assert histogram(example_step().response_length.histogram) in text


def test_the_picture_of_a_run_with_processes_names_each_and_whom_it_waits_for() -> None:
    view = a_full_view(console := terminal(width=110, height=40))
    fast = load("generator-1", speed=900.0)
    told = [
        process("generator", 0, "restarting", "killed by SIGKILL", pid=None, num_restarts=2),
        process("generator", 1, "working", "12 samples", by_hand=True, pid=41001, load=fast),
        process("reward", 0, "waiting", "finished samples", waits_for=("generator 1", "generator 2")),
        process("reward", 1, "held", "stopped from outside"),
    ]
    view.progress.take_workers(told)
    text = "\n".join(picture(view, console))
    for said in (
        "generator 0", "restarted 2x  restarting  killed by SIGKILL", "generator 1+", "41001",
        "40+3 at 900 tok/s  12 samples", "waits for generator 1, 2: finished samples", "held  stopped from outside",
    ):  # fmt: skip
        assert said in text, said


def test_of_many_processes_those_that_have_something_to_tell_are_shown() -> None:
    view = a_full_view(console := terminal())
    doing = ["held" if n == 37 else "waiting" for n in range(40)]
    view.progress.take_workers([process("generator", n, each, "prompts") for n, each in enumerate(doing)])
    lines = picture(view, console)
    assert len(lines) <= 24
    assert any("generator 37" in line for line in lines)
    assert any("and 33 more" in line for line in lines)


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("texts", ["12+34", "漢字" * 60, HOSTILE, "x" * 500, "line\n" * 50, ""])
def test_the_live_view_fits_the_terminal(width: int, texts: str) -> None:
    console = terminal(width)
    lines = picture(a_full_view(console, texts=texts, strategy=texts), console)
    assert len(lines) < console.height, "the cursor needs a line of its own"
    assert {cell_len(line) for line in lines} == {min(width, 110)}


@pytest.mark.parametrize("filler", ["x", "漢"])
def test_of_a_long_prompt_the_end_is_shown(filler: str) -> None:
    view, _ = a_view(console := terminal())
    view.progress.sample(replace(example_sample(), prompt_text=filler * 200 + " 12+34=?"))
    assert any(line.startswith("│ …") and line.rstrip(" │").endswith(" 12+34=?") for line in picture(view, console))


def test_the_picture_begins_empty_and_small() -> None:
    view, _ = a_view(console := terminal())
    text = "\n".join(picture(view, console))
    assert "step 1/60" in text
    assert "after the first step" in text


@given(st.text() | st.text(alphabet=st.characters(max_codepoint=0x9F)))
@example(HOSTILE)
def test_visible_text_has_no_control_characters(text: str) -> None:
    safe = visible(text)
    assert all(character == "\n" or unicodedata.category(character)[0] != "C" for character in safe)
    assert safe.count("\n") == text.count("\n")
    safe.encode()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_hostile_text_is_harmless_in_every_way_out(encoding: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    console = terminal(encoding=encoding)
    print_line(console, HOSTILE)
    view, _ = a_view(console, view="plain")
    with view:
        view.say(HOSTILE)
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        folder.begin(example_job(), resume=False)
        folder.append_samples([replace(example_sample(text=HOSTILE), prompt_text=HOSTILE)], {})
        folder.append_step(example_step())
        summarize(folder, resume_command=HOSTILE, num_texts=1).print(console)
    text = written(console)
    assert "[red]not markup[/red] :smile:" in text
    assert not set(text) & set("\x1b\x9b\x07\x00\x08\r\u202e\u2028\u2029")


def test_hostile_text_is_harmless_in_the_picture() -> None:
    console = terminal()
    text = "".join(picture(a_full_view(console, texts=HOSTILE, strategy=HOSTILE), console))
    assert not set(text) & set("\x1b\x9b\x07\x00\x08\r\u202e\u2028\u2029\ud800")
    assert "[red]" in text


def test_without_a_terminal_the_view_prints_plain_lines() -> None:
    view, hand = a_view(console := Console(file=io.StringIO(), width=80), steps=3)
    with view:
        for step in (1, 2, 3):
            hand.seconds += 3.8
            view.progress.sample(example_sample(step=step))
            view.step(example_step(step=step))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4, "one for the job, one a step, none folded"
    assert all(len(line) < 160 for line in lines)
    assert all("generator/trainer log-prob difference max 3.1e-07" in line for line in lines[1:])
    assert "ETA 7.6s" in lines[1]
    assert "ETA" not in lines[3]


def test_numbers_that_do_not_apply_are_not_shown() -> None:
    metrics = replace(example_step(), kl=None, accepted_per_verification=None, tokens_per_second=None)
    line = step_line(metrics, RunProgress(example_job(), Hand()))
    view, _ = a_view(console := terminal())
    view.step(metrics)
    for said in (line, "\n".join(picture(view, console))):
        assert not any(name in said for name in ("KL", "accepted", "tok/s"))
    tell(view, replace(load(), accepted_per_verification=None))  # type: ignore[arg-type]
    assert not any("accepted" in line for line in picture(view, console)), "nothing was drafted"
    tell(view, load("g1"))
    assert any("2.31 accepted" in line for line in picture(view, console)), "the mean is of those that drafted"


def test_the_kl_is_shown_with_its_estimator() -> None:
    metrics = replace(example_step(), kl={"k1": -0.01, "k3": 0.002})
    assert "KL k1 -0.0100, k3 0.00200  " in step_line(metrics, RunProgress(example_job(), Hand()))
    view, _ = a_view(console := terminal())
    view.step(metrics)
    (row,) = [line for line in picture(view, console) if "KL" in line]
    assert row.startswith("│ KL        0.00200"), "k3, which is never negative, is what is drawn"
    assert "to the reference (k1 -0.0100, k3" in row


def test_evaluations_are_told_with_the_best() -> None:
    runs = [example_evaluation(step=step, reward=reward) for step, reward in ((0, 0.25), (10, 0.75), (20, 0.5))]
    view, _ = a_view(console := terminal())
    view.progress.history([example_step(step=20)], runs[:2])
    view.evaluation(runs[2])
    assert any("held-out  0.500" in line and "best 0.750 after step 10" in line for line in picture(view, console))
    view, _ = a_view(plain := Console(file=io.StringIO()))
    view.evaluation(runs[0])
    told = "evaluation after step 0: reward 0.250  (best 0.250 after step 0)  length 27.5  4 held-out samples  1.5s"
    assert told in plain.file.getvalue()  # type: ignore[attr-defined]


def test_the_mode_follows_the_terminal() -> None:
    assert a_view(terminal())[0].mode == "live"
    assert a_view(terminal(encoding="ascii"))[0].mode == "plain"
    assert a_view(Console(file=io.StringIO()))[0].mode == "plain"
    assert a_view(Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}))[0].mode == "plain"
    assert a_view(terminal(), view="plain")[0].mode == "plain"
    with pytest.raises(InvalidRequest, match=r"observability\.view"):
        a_view(terminal(encoding="ascii"), view="live")


def test_view_off_prints_nothing() -> None:
    view, _ = a_view(console := terminal(), view="off")
    with view:
        view.step(example_step())
        view.say("hello")
    assert written(console) == ""


def test_the_last_live_picture_stays_on_the_screen() -> None:
    view, _ = a_view(console := terminal())
    with view:
        view.step(example_step(step=1))
        view.say("a checkpoint was written")
    text = written(console)
    assert "a checkpoint was written" in text
    assert text.count("Ctrl-C") >= 2
    assert "since step 1" in text.split("Ctrl-C")[-2], "the last picture is the newest"
    assert text.endswith("\x1b[?25h"), "the cursor is given back"


def test_the_cursor_comes_back_after_an_error() -> None:
    view, _ = a_view(console := terminal())
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert written(console).endswith("\x1b[?25h")


def test_a_sample_counts_once_and_in_its_step() -> None:
    view, _ = a_view(terminal())
    for prompt in (0, 1, 1, 0, 2):
        view.progress.sample(example_sample(step=1, prompt=prompt))
    assert view.progress.num_samples_done == 3
    view.step(example_step(step=1))
    assert view.progress.num_samples_done == 0
    view.progress.sample(example_sample(step=2))
    assert view.progress.num_samples_done == 1


def test_speeds_of_generators_add_up() -> None:
    view, _ = a_view(console := terminal())
    tell(view, load("g0", 100.0))
    tell(view, load("g1", 150.0))
    tell(view, load("g1", 200.0))
    assert any("300" in line for line in picture(view, console))


def test_drafters_are_shown_by_law_and_by_cost() -> None:
    view, _ = a_view(console := terminal())
    view.step(example_step(step=1))
    tell(view, load("g0"))
    assert not any("drafter" in line for line in picture(view, console))
    told = replace(load("g0"), drafting=(DRAFTING, replace(DRAFTING, drafter="suffix", num_verifications=1)))
    tell(view, told)
    [line] = [line for line in picture(view, console) if "drafter" in line]
    assert "16.0     s saved  2.82 a verification  accepted .95 .90  level .42" in line
    assert not any("learnt" in line for line in picture(view, console))
    tell(view, replace(told, learning_seconds=12.0, drafter_version=36864))
    [line] = [line for line in picture(view, console) if "learnt" in line]
    assert "12.0     s learning, at 36k" in line


def test_how_old_a_drafter_is_is_shown_once_it_was_seen_to_learn() -> None:
    view, _ = a_view(console := terminal())
    view.step(example_step(step=1))
    told = replace(load("g0"), drafter_version=4000, weights_version=3)

    def shown(*loads: Load) -> str:
        tell(view, *loads)
        [line] = [line for line in picture(view, console) if "learnt" in line]
        return line

    assert "at 4k" in shown(told)
    assert "at 4k" in shown(replace(told, weights_version=4)), "it may have learnt long before"
    assert "at 9k" in shown(replace(told, drafter_version=9000, weights_version=4))
    later = replace(told, drafter_version=9000, weights_version=6)
    assert "age 2" in shown(later)
    assert "at 12k" in shown(replace(later, drafter_version=12_000))


def test_eta_counts_down_within_a_step_and_never_below_the_next() -> None:
    view, hand = a_view(terminal(), steps=11)
    assert view.progress.eta_seconds is None
    view.step(example_step(step=1))
    assert view.progress.eta_seconds == pytest.approx(38.0)
    hand.seconds += 2.0
    assert view.progress.eta_seconds == pytest.approx(36.0)
    hand.seconds += 1000.0
    assert view.progress.eta_seconds == pytest.approx(34.2)


def test_a_resumed_run_shows_its_earlier_steps() -> None:
    view, _ = a_view(console := terminal(), steps=9)
    view.progress.history([example_step(step=step, reward=0.1) for step in (1, 2, 3)])
    view.step(example_step(step=4, reward=0.4))
    text = "\n".join(picture(view, console))
    assert "step 5/9" in text
    assert "+0.300 since step 1" in text


def test_utilisation_is_of_the_last_seconds() -> None:
    """A worker that idled for long and now works is busy."""
    view, hand = a_view(terminal())
    for busy in [0.0] * 100 + [float(second) for second in range(1, 11)]:
        hand.seconds += 1.0
        view.progress.take_workers([process("reward", 0, "working", "reward of sums/1/0/0", busy_seconds=busy)])
        if not busy:
            assert [share for _, share in view.progress.workers] == [0.0]
    assert [share for _, share in view.progress.workers] == [pytest.approx(1.0)]


@given(st.lists(st.floats(-1e9, 1e9), max_size=200), st.integers(1, 60))
@settings(max_examples=40)
def test_a_sparkline_is_never_wider_than_its_place(values: list[float], width: int) -> None:
    drawn = sparkline(values, width)
    assert len(drawn) == min(width, len(values))
    assert re.fullmatch("[▁▂▃▄▅▆▇█]*", drawn)


def test_what_is_reported_costs_the_same_however_much_there_was() -> None:
    view, _ = a_view(terminal())
    snapshot = [process(name, 0, "working", "x") for name in ("prompts", "generator", "reward", "trainer")]
    samples = [example_sample(step=1, prompt=prompt) for prompt in range(2000)]
    counts = []
    for sample in samples:
        with counting_calls() as calls:
            view.progress.sample(sample)
            tell(view, load())
            view.progress.take_workers(snapshot)
            counts.append(calls())
    assert median(counts[-500:]) <= median(counts[10:510])  # a few are in a moment when it also draws
    assert view.progress.num_samples_done == 2000


def finished(folder: RunFolder, steps: list[StepMetrics], outcome: str = "completed", reason: str = "") -> None:
    folder.begin(example_job(), resume=False)
    for metrics in steps:
        folder.append_step(metrics)
    folder.finish(outcome, reason)  # type: ignore[arg-type]


def test_the_summary_says_what_came_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    console = terminal(100)
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        finished(folder, [example_step(step=step, reward=step / 40) for step in range(1, 31)])
        (folder.plots).mkdir()
        (folder.plots / "training.png").touch()
        for step, text, reward in ((1, "5", 0.0), (30, "```\n4\n````", 1.0)):
            sample = example_sample(step=step, text=text)
            folder.append_samples([sample], {sample.id: example_score(0, 0, reward, step=step)})
        summarize(folder, resume_command="rlhfspec run job.yaml --resume", num_texts=4).print(console)
        markdown = folder.summary_file.read_text()
    text = written(console)
    for said in (
        "completed after 30 steps", "0.0500 -> 0.725 (+0.675)", "generator/trainer log-prob difference max 3.1e-07",
        "generation", "53%", "rlhfspec run job.yaml --resume", str(folder.plots), "train longer",
    ):  # fmt: skip
        assert said in text, said
        assert said in markdown, said
    assert "exported" not in text
    assert text.index("of step 1\n  reward 0\n    | 2+2=5") < text.index("of step 30\n  reward 1.00")
    assert "`````text\n```\n4\n````\n`````" in markdown, "the text cannot close its fence"


def test_the_summary_shows_the_end_of_a_long_prompt_and_the_size_of_checkpoints(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        finished(folder, [example_step(step=1)])
        sample = replace(example_sample(step=1, text="b" * 900), prompt_text="a" * 500 + "?")
        folder.append_samples([sample], {sample.id: example_score(0, 0, 1.0)})
        folder.checkpoint(1).mkdir(parents=True)
        (folder.checkpoint(1) / "learner.safetensors").write_bytes(bytes(2_500_000))
        told = summarize(folder, resume_command="again", num_texts=1).markdown()
    assert f"... {'a' * 199}?\n" in told
    assert "a" * 200 not in told
    assert "b" * 900 in told
    assert "checkpoints take: `2.5 MB, for steps 1`" in told


def test_the_summary_names_the_best_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        finished(folder, [replace(example_step(step=step), accepted_per_verification=None) for step in (1, 2)])
        for step, reward in ((0, 0.25), (1, 0.75), (2, 0.5)):
            folder.append_evaluation(example_evaluation(step=step, reward=reward))
        assert "best checkpoint" not in summarize(folder, resume_command="again").markdown(), "it was not kept"
        folder.checkpoint(1).mkdir(parents=True)
        told = summarize(folder, resume_command="again").markdown()
        assert "| held-out reward | 0.250 -> 0.500, best 0.750 after step 1 |" in told
        assert f"- best checkpoint: `{folder.checkpoint(1)}`" in told
        assert "accepted" not in told, "nothing was drafted"
        with CheckpointStore(folder.checkpoints, keep=1) as store:
            assert store.save(7, {}) == folder.checkpoint(7), "both know where a step's checkpoint is"


def test_a_run_that_failed_early_is_summarized_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    console = terminal()
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        finished(folder, [], "failed", "reward: TypeError")
        summarize(folder, resume_command="again").print(console)
    assert "sums: failed after 0 steps: reward: TypeError" in written(console)
    assert "go on" in written(console)
