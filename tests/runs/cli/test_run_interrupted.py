"""Runs survive Ctrl-C, kill -9, a failing reward, a full disk and the end of data without changing the curve."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runs import curve_of, invoke, lines_of, train, with_reward
from started import Started, eventually, hold_rewards

from rlhfspec.cli.signals import on_signals

OFF = "generation.speculation.mode=off"


def start(job_file: Path, out: str, *overrides: str, resume: bool = False, fresh: bool = True) -> Started:
    return Started(job_file, out, *overrides, resume=resume, fresh=fresh, processes=False)


STEPS = "training.steps=5"


@pytest.fixture
def whole(job_file: Path) -> list[dict[str, Any]]:
    return train(job_file, "whole", STEPS)


def test_ctrl_c_ends_cleanly_and_a_resume_continues_the_curve(job_file: Path, whole: list[dict[str, Any]]) -> None:
    hold = hold_rewards(job_file, "1 stopped")
    run = start(job_file, "stopped", STEPS, "checkpoint.everySteps=100")
    run.until_step(1)
    run.process.send_signal(signal.SIGINT)
    run.until("stopping")
    hold.unlink()
    assert "--resume" in run.ends(130), "says how to go on"
    done = len(lines_of(job_file, "stopped"))
    assert 1 <= done < 5
    manifest = json.loads((job_file.parent / "stopped" / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["num_steps"]) == ("stopped", done)
    assert train(job_file, "stopped", STEPS, "checkpoint.everySteps=100", resume=True) == whole


def test_killed_at_any_moment_it_resumes_from_the_last_checkpoint(job_file: Path, whole: list[dict[str, Any]]) -> None:
    draw = random.Random(7)
    for attempt in range(3):
        run = start(job_file, "killed", STEPS, resume=attempt > 0, fresh=False)
        run.until_step(attempt + 1)
        time.sleep(draw.random() * 0.3)
        run.process.kill()
        run.process.communicate()
    assert train(job_file, "killed", STEPS, resume=True) == whole
    ids = [json.loads(line)["id"] for line in (job_file.parent / "killed" / "samples.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 5 * 9


def test_ctrl_c_before_the_first_step_is_quiet(job_file: Path) -> None:
    run = start(job_file, "early")
    run.until("importing torch")
    manifest = json.loads((job_file.parent / "early" / "manifest.json").read_text())
    assert manifest["outcome"] == "running", "others see the run before anything is loaded"
    run.process.send_signal(signal.SIGINT)
    assert "stopped" in run.ends(130)
    assert not (job_file.parent / "early").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_while_compiled_code_runs(number: signal.Signals) -> None:
    """Python's own handlers would wait for compiled code, such as a tokenizer's."""
    code = (
        "import hashlib; from rlhfspec.cli.signals import *\n"
        "with on_signals(lambda: leave_at_once('stopped')):\n"
        "    print('begun', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "\nstopped\n")


def test_nested_signal_blocks_react_from_the_inside_out() -> None:
    heard = {name: threading.Event() for name in ("inner", "outer")}
    before = signal.getsignal(signal.SIGTERM)
    with on_signals(heard["outer"].set):
        with on_signals(heard["inner"].set):
            signal.raise_signal(signal.SIGTERM)
            assert heard["inner"].wait(60)
        assert not heard["outer"].is_set()
        signal.raise_signal(signal.SIGTERM)
        assert heard["outer"].wait(60)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_summary_ends_it(job_file: Path, number: signal.Signals) -> None:
    """The summary is written to an unread pipe, so it never ends by itself."""
    folder = job_file.parent / "out"
    folder.mkdir()
    os.mkfifo(folder / ".summary.md.tmp")
    run = start(job_file, "out", "training.steps=1", "observability.sampleTexts=1")
    manifest = folder / "manifest.json"
    eventually(lambda: manifest.exists() and '"completed"' in manifest.read_text(), "it is done")
    run.process.send_signal(number)
    output = run.ends(130)
    assert output.endswith("\nstopped\n")
    assert "Aborted" not in output


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raise ValueError('no digits')", "no digits"),
        ("return float('nan')", "not a finite number"),
        ("return 'good'", "not a number"),
        ("import time; time.sleep(60)", "0.2 s"),
    ],
)
def test_a_failing_reward_ends_the_run_with_its_name(job_file: Path, function: str, said: str) -> None:
    with_reward(job_file, function, timeoutSeconds=0.2)
    result = invoke(job_file, "failing", OFF, code=1)
    assert isinstance(result.exception, SystemExit)
    assert "failed" in result.output
    assert "reward" in result.output
    assert said in result.output
    assert "letters/1/" in result.output, "names the sample"
    manifest = json.loads((job_file.parent / "failing" / "manifest.json").read_text())
    assert manifest["outcome"] == "failed"
    assert said in manifest["reason"]


def test_a_dropped_sample_is_counted_and_never_a_zero(job_file: Path) -> None:
    code = "return len(completion) if '1+' not in prompt else None"
    with_reward(job_file, code, arguments="prompt, completion", onError="drop")
    invoke(job_file, "picky", OFF, "dataset.shuffle=false", "training.promptsPerStep=5", "training.steps=1", code=0)
    [line] = map(json.loads, lines_of(job_file, "picky"))
    assert line["num_dropped"] == 3, "the one prompt with 1+, three samples of it"
    assert line["reward"]["min"] > 0


def test_a_run_ends_normally_when_its_data_ends(job_file: Path) -> None:
    result = invoke(job_file, "ends", OFF, "dataset.epochs=1", "training.steps=9", "training.promptsPerStep=12", code=0)
    assert "the data ended after step 2" in result.output
    assert len(lines_of(job_file, "ends")) == 2


def test_full_disk_loses_nothing(job_file: Path, whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third checkpoint finds no room; the second stands, and with room again the curve is the same."""
    from rlhfspec.training.checkpoint import folders

    write = folders.write_checkpoint

    def full(folder: Path, step: int, state: Any) -> None:
        if step == 3:
            raise OSError(28, "No space left on device")
        write(folder, step, state)

    monkeypatch.setattr("rlhfspec.training.checkpoint.store.write_checkpoint", full)
    result = invoke(job_file, "full", OFF, STEPS, code=1)
    assert "No space left on device" in result.output
    assert "earlier ones are untouched" in result.output
    monkeypatch.undo()
    assert train(job_file, "full", STEPS, resume=True) == whole


def test_disk_others_fill_ends_run_in_one_line(job_file: Path, whole: list[dict[str, Any]], small_disk: Path) -> None:
    """Another process fills the disk while the second step is scored. With room again the run resumes."""
    filler = small_disk / "filler"
    rewards = (job_file.parent / "rewards.py").read_text()
    (job_file.parent / "rewards.py").write_text(
        f"{rewards}\nimport itertools\ncount = itertools.count()\n"
        "def full(completion):\n"
        "    if next(count) == 9:\n"
        "        try:\n"
        f"            with open({str(filler)!r}, 'wb', buffering=0) as file:\n"
        "                while file.write(bytes(1)): pass\n"
        "        except OSError: pass\n"
        "    return letters(completion)\n"
    )
    options = (STEPS, "checkpoint.everySteps=100", "rewards.sources=[{type: function, function: 'rewards:full'}]")
    [line] = [line for line in start(job_file, "disk/out", *options).ends(1).splitlines() if "out: failed" in line]
    assert "samples.jsonl: cannot be written: No space left on device" in line
    assert "failure.txt" in line
    assert "the outcome cannot be written: " in line
    filler.unlink()
    assert len(lines_of(job_file, "disk/out")) == 1, "the first step is whole"


def test_a_folder_that_holds_a_run_is_refused_for_another(job_file: Path) -> None:
    train(job_file, "run", "training.steps=1")
    again = invoke(job_file, "run", OFF, "training.steps=1", code=2)
    assert "--resume" in again.output
    assert "loading the policy" not in again.output, "found before anything takes long"
    other = invoke(job_file, "run", OFF, "training.seed=8", resume=True, code=2)
    assert "spec.training.seed was 0 and is 8 now" in other.output
    assert [line["step"] for line in curve_of(job_file, "run")] == [1]
