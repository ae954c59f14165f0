"""Samples that move between processes while they run: the curve stays that of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from advice import Adviser
from runs import train
from test_processes import Started, starting  # noqa: F401

LONG = (
    "roles.generator.workers=2",
    "generation.maxTokens=192",
    "generation.kvCacheTokens=65536",
    "training.promptsPerStep=8",
    "training.steps=6",
)


def test_random_moves_every_50_ms_change_no_bit_of_the_curve(
    job_file: Path,
    starting: Callable[..., Started],  # noqa: F811
) -> None:
    whole = train(job_file, "one", *LONG)
    run = starting("many", *LONG)
    run.until("(7 of 7)")
    with Adviser(run.folder / "processes" / "connections.json", seed=1) as adviser:
        code, output = run.ended()
    assert code == 0, output
    assert run.curve() == whole
    one, many = ((job_file.parent / out / "samples.jsonl").read_bytes() for out in ("one", "many"))
    assert one == many
    assert adviser.outcomes["kv"] >= 10, (adviser.outcomes, adviser.moved[-3:])
