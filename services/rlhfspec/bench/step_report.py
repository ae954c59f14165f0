"""The table of `rlhfspec bench step`: seconds a step by mode and stage, and how many times as fast as TRL."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhfspec.bench.step import ADAPTIVE, PLAIN_STEP, STEP_PARTS, TRL, StepResults, StepRow

WANTED = 2.0  # times as fast as TRL


def render(results: StepResults) -> Group:
    parts: list[RenderableType] = [_heading(results), _table(results)]
    parts += [
        _bar(mode, ratio) for mode in (PLAIN_STEP, ADAPTIVE) if (ratio := results.times_as_fast(mode)) is not None
    ]
    parts += [Text(f"left out: {line}", style="yellow") for line in results.skipped]
    return Group(*parts)


def _heading(results: StepResults) -> Text:
    told, settings = results.machine, results.settings
    num_samples = settings["prompts_per_step"] * settings["samples_per_prompt"]
    prompt_tokens = settings["num_prompt_tokens"]
    asked = "" if prompt_tokens is None else f" to prompts of {prompt_tokens}"
    work = f"{num_samples} samples of {settings['num_tokens']} tokens{asked} a step"
    return Text(
        f"{told.cpu}, {settings['num_threads']} thread(s), {settings['dtype']}, arithmetic {told.arithmetic}\n"
        f"{settings['algorithm'].upper()} on {settings['model']}: {work}, "
        f"medians of {len(results.rows[0].steps) if results.rows else 0} steps; stages of ours overlap"
    )


def _table(results: StepResults) -> Table:
    table = Table(title="seconds a training step", title_style="bold")
    for name in ("mode", "step", *STEP_PARTS, "tokens a step", "times TRL"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in results.rows:
        ratio = results.times_as_fast(row.mode)
        cells = [row.mode, f"{row.seconds_per_step:.2f}", *_stages(row), f"{row.tokens_per_step:.0f}"]
        table.add_row(*cells, "-" if ratio is None or row.mode == TRL else f"{ratio:.2f}")
    return table


def _stages(row: StepRow) -> list[str]:
    return [f"{row.by_stage[name]:.2f}" if name in row.by_stage else "-" for name in STEP_PARTS]


def _bar(mode: str, ratio: float) -> Text:
    holds = ratio >= WANTED
    mark = "holds" if holds else "does not hold"
    return Text(f"{mode} >= {WANTED:g}x TRL: {ratio:.2f} ({mark})", style="green" if holds else "red")
