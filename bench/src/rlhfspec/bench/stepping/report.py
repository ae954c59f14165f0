"""Table of `rlhfspec bench step`: seconds per step by mode and stage, and speed relative to TRL."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.stepping.results import STEP_PARTS, TRL, StepResults, StepRow
from rlhfspec.bench.tables import ending, table_of


def render(results: StepResults) -> Group:
    return Group(_heading(results), _table(results), *ending(results))


def _heading(results: StepResults) -> Text:
    settings = results.settings
    num_samples = settings["prompts_per_step"] * settings["samples_per_prompt"]
    prompt_tokens = settings["num_prompt_tokens"]
    asked = "" if prompt_tokens is None else f" to prompts of {prompt_tokens}"
    work = f"{num_samples} samples of {settings['num_tokens']} tokens{asked} a step"
    trained = "" if settings["lora_rank"] is None else f" (LoRA, rank {settings['lora_rank']})"
    return Text(
        f"{results.cpu}, {settings['num_threads']} thread(s), {settings['dtype']}, arithmetic {results.arithmetic}\n"
        f"{settings['algorithm'].upper()} on {settings['model']}{trained}: {work}, "
        f"medians of {len(results.rows[0].steps) if results.rows else 0} steps; stages of ours overlap"
    )


def _table(results: StepResults) -> Table:
    columns = ("mode", "step", *STEP_PARTS, "tokens a step", "peak GB", "times TRL")
    table = table_of("seconds a training step", columns, left=("mode",))
    for row in results.rows:
        ratio = results.times_as_fast(row.mode)
        work = (f"{row.tokens_per_step:.0f}", f"{row.peak_gigabytes:.1f}")
        cells = [row.mode, f"{row.seconds_per_step:.2f}", *_stages(row), *work]
        table.add_row(*cells, "-" if ratio is None or row.mode == TRL else f"{ratio:.2f}")
    return table


def _stages(row: StepRow) -> list[str]:
    return [f"{row.by_stage[name]:.2f}" if name in row.by_stage else "-" for name in STEP_PARTS]
