"""Measure the cost of observability by sending many samples through a loop of idle stages.

    python bench/tracing.py [RUN]

Runs without observer, with traces in a folder, with metrics, and with both take turns; each reports its best CPU time
over all threads. With a run folder, the share of its step time is printed too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rlhfspec.messages.records import Prompt, Sample, Score, ScoringStage, StepReport
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.stage.bus import Bus, StageBus, ack_all
from rlhfspec.telemetry.opening import watching

NUM_SAMPLES = 256
ROUNDS = 30
SCORING: tuple[ScoringStage, ...] = ("reward", "reference", "critic")
WAYS = {"nobody": (False, False), "traces": (True, False), "metrics": (False, True), "both": (True, True)}


def main() -> None:
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for name, (traces, metrics) in WAYS.items():
            best[name] = min(best[name], asyncio.run(_loop(traces=traces, metrics=metrics)))
    seconds_a_sample = _seconds_a_sample(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    for name, seconds in best.items():
        more = (seconds - best["nobody"]) / NUM_SAMPLES
        share = f", {more / seconds_a_sample:.2%} of a step" if seconds_a_sample else ""
        print(f"{name:8} {seconds / NUM_SAMPLES * 1e6:7.1f} us a sample, {more * 1e6:+7.1f} us{share}")


def _seconds_a_sample(run: Path) -> float:
    steps = RunFolder(run).steps()
    return sum(step.seconds.step for step in steps) / sum(step.num_samples for step in steps)


async def _loop(*, traces: bool, metrics: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        bus = await Bus.open(
            MemoryTransport(), "sums", workers=dict.fromkeys(("prompts", "generator", *SCORING, "trainer"), 1)
        )
        with watching("sums", "3f2a", run=Path(folder) if traces else None, metrics=metrics) as looking:
            bus.watcher = looking.watcher
            began = time.process_time()
            await _samples(bus)
        return time.process_time() - began


async def _samples(bus: Bus) -> None:
    stages = {name: bus.of(name) for name in ("prompts", "generator", *SCORING, "trainer")}
    prompts = await stages["generator"].subscribe(Prompt)
    inboxes = {name: await stages[name].subscribe(Sample) for name in (*SCORING, "trainer")}
    scores = await stages["trainer"].subscribe(Score)
    for number in range(NUM_SAMPLES):
        await stages["prompts"].publish(_prompt(number))
    for taken in await prompts.pull(max_records=NUM_SAMPLES, timeout_seconds=0):
        await stages["generator"].publish(_sample(taken.record))
        await taken.ack()
    for name in SCORING:
        while deliveries := await inboxes[name].pull(max_records=64, timeout_seconds=0):
            for delivery in deliveries:
                await stages[name].publish(_score(delivery.record, name))
                await delivery.ack()
    held = [one.held for one in await inboxes["trainer"].pull(max_records=NUM_SAMPLES, timeout_seconds=0)]
    held += [one.held for one in await scores.pull(max_records=3 * NUM_SAMPLES, timeout_seconds=0)]
    await _end_step(stages["trainer"])
    await ack_all(held)


async def _end_step(trainer: StageBus) -> None:
    await trainer.publish(StepReport(id="sums/1/report", job="sums", metrics=example_step(step=1)))


def _prompt(number: int) -> Prompt:
    return Prompt(
        id=f"sums/1/{number}/0", job="sums", step=1, prompt=number, replica=0, text="48+75=", token_ids=(1,) * 6,
        columns_json='{"answer": "123"}', seed=number, weights_version=0,
    )  # fmt: skip


def _sample(prompt: Prompt) -> Sample:
    return Sample(
        id=prompt.id, job="sums", step=1, prompt=prompt.prompt, replica=0, prompt_text=prompt.text,
        prompt_token_ids=prompt.token_ids, columns_json=prompt.columns_json, text="123" * 30, token_ids=(2,) * 100,
        log_probs=(-0.5,) * 100, tempered_log_probs=(-0.5,) * 100, weights_versions=(0,) * 100, finish_reason="stop",
        strategies=(("plain", 90), ("suffix-d4-w1-b2", 10)), generator="generator-0",
    )  # fmt: skip


def _score(sample: Sample, stage: ScoringStage) -> Score:
    values = (1.0,) if stage == "reward" else sample.log_probs
    id = f"{sample.id}/{stage}"
    return Score(id=id, sample_id=sample.id, job="sums", step=1, stage=stage, values=values)


if __name__ == "__main__":
    main()
