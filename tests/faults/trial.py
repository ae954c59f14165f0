"""Comparison of an undisturbed run in one process with the same run under a schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runs import curve_of, train, write_data, write_job, write_models
from started import hold_rewards

from faults.harness import Disturbed, FaultyRun
from faults.joining import Joined
from faults.schedule import Fault, schedule
from rlhfspec.tiny.random_models import random_model

WORKERS = ("prompts-0", "generator-0", "generator-1", "reward-0", "reward-1", "reference-0", "critic-0", "trainer-0")
OVERRIDES = ("generation.speculation.mode=off", "roles.generator.workers=2", "roles.reward.workers=2")
OVERRIDES += ("training.promptsPerStep=4", "training.optimizer.learningRate=1e-3", "checkpoint.everySteps=3")
OVERRIDES += ("failurePolicy.backoffSeconds=0.1", "failurePolicy.maxBackoffSeconds=1.0")
STEPS_HELD, STEPS_AFTER = 10, 20  # the last wave begins: so many are trained until it is over, and so many in all


def trial(folder: Path, seed: int, num_kills: int, say: Callable[[str], None], *, held_seconds: float) -> FaultyRun:
    """Run a trial. Raise `Disturbed` with the seed and the command to repeat it."""
    faults = schedule(seed, num_kills, WORKERS, most_held_seconds=held_seconds)
    with again(seed, f"--kills {num_kills} --held-seconds {held_seconds:g}"):
        return _trial(folder, faults, say)


@contextmanager
def again(seed: int, options: str) -> Iterator[None]:
    """Add the seed and the command to repeat it to any failure."""
    try:
        yield
    except Disturbed as error:
        command = f"PYTHONPATH=tests python -m faults --seed {seed} {options}"
        raise Disturbed(f"seed {seed}: {error}\nagain: {command}") from error


def join_and_leave(folder: Path, say: Callable[[str], None]) -> None:
    """Run while a generator joins and leaves. Small batches leave it work; the run lasts as long as the visit."""
    job = written(folder, name="grpo")
    overrides = [*OVERRIDES, "training.promptsPerStep=16", "generation.maxTokens=64", "generation.maxSequences=4"]
    run = FaultyRun(job, folder / "faults", [*overrides, "training.steps=100000"], say)
    with run.started():
        run.until(lambda: run.num_steps >= 1, "the first step")
        Joined(run, say).visit()
        run.interrupt()
    check(job, train(job, "undisturbed", *overrides, f"training.steps={run.num_steps}"))


def _trial(folder: Path, faults: Sequence[Fault], say: Callable[[str], None]) -> FaultyRun:
    job = written(folder, name="ppo", samplesPerPrompt=2)
    overrides = [*OVERRIDES, f"training.steps={faults[-1].after_step + STEPS_AFTER}"]
    hold = hold_rewards(job, f"{faults[-1].after_step + STEPS_HELD} faults")
    undisturbed = train(job, "undisturbed", *overrides)
    run = FaultyRun(job, folder / "faults", overrides, say)
    with run.started():
        for fault in faults:
            run.wait_and_strike(fault)
        hold.unlink()
    check(job, undisturbed)
    return run


def written(folder: Path, **algorithm: Any) -> Path:
    write_models(folder, random_model("llama", seed=1, vocab_size=260))
    write_data(folder)
    return write_job(folder, folder, **algorithm)


def check(job: Path, undisturbed: list[dict[str, Any]]) -> None:
    if curve_of(job, "faults") != undisturbed:
        raise Disturbed("its curve is another one")
    one, other = ((job.parent / out / "samples.jsonl").read_bytes() for out in ("undisturbed", "faults"))
    if one != other:
        lines = [len(text.splitlines()) for text in (one, other)]
        raise Disturbed(f"its samples are others ({lines[0]} lines without faults, {lines[1]} with them)")
