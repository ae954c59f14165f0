import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.processes import is_alive, named, of_run
from runs import command, train
from started import Started, eventually, hold_rewards

from rlhfspec.tiny import random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

PARTS = "roles.generator.tensorParallel=2"


def tokens_of(folder: Path) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.whole("whole runs in which processes are killed, one after the other")
@pytest.mark.parametrize("which", [1, 0])
def test_killed_generator_parts_keep_the_curve(which: int, job_file: Path, starting: Callable[..., Started]) -> None:
    hold = hold_rewards(job_file, "0 many")
    steps = "training.steps=3"
    whole = train(job_file, "one", steps)
    run = starting("many", steps, "roles.generator.workers=2", PARTS)
    run.until("(7 of 7)")
    uid = run.connections["uid"]
    killed, others = named(uid, "generator-0"), named(uid, "generator-1")
    assert len(killed) == len(others) == 2
    os.kill(killed[which], signal.SIGKILL)
    assert "started again" in run.until("generator 0: killed by SIGKILL")
    assert not any(map(is_alive, killed)), "the rest of its group ended with it"
    eventually(lambda: len(named(uid, "generator-0")) == 2, "the group is there again")
    assert all(is_alive(pid) for pid in others), "the other group is none of its business"
    hold.unlink()
    run.ends()
    assert run.curve() == whole, "the tokens are the same, and the trainer computes log-probs of its own"
    assert tokens_of(run.folder) == tokens_of(job_file.parent / "one")
    assert not of_run(uid), "nobody is left"


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_ended_run_leaves_no_part_behind(end: signal.Signals, job_file: Path, starting: Callable[..., Started]) -> None:
    hold = hold_rewards(job_file, "1 many")
    run = starting("many", PARTS)
    run.until(" 1/3 ")
    uid = run.connections["uid"]
    run.process.send_signal(end)
    if end == signal.SIGINT:
        run.until("stopping: ")
        hold.unlink()
        run.ends(130)
        assert not of_run(uid), "nobody is left"
    run.process.wait()
    eventually(lambda: not of_run(uid), "all are gone")


def test_tensor_parallel_that_does_not_divide_the_heads_is_refused(job_file: Path) -> None:
    result = command(["validate", str(job_file), "--set", "roles.generator.tensorParallel=4"], 2)
    assert (
        "spec.roles.generator.tensorParallel: must divide the model's num_key_value_heads (2) (got 4)" in result.output
    )


def test_a_model_that_cannot_be_cut_is_refused_by_name(job_file: Path, starting: Callable[..., Started]) -> None:
    folder = job_file.parent / "phi3"
    random_model("phi3", seed=0, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    run = starting("many", PARTS, f"model.path={folder}")
    assert "spec.model.path: cannot be cut over 2 processes: Phi3ForCausalLM needs rowwise_split_input" in run.ends(2)
