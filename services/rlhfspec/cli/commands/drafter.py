from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine, wide_console
from rlhfspec.cli.signals import on_signals
from rlhfspec.errors import InvalidRequest
from rlhfspec.runs.view.text import shares

if TYPE_CHECKING:
    from rlhfspec.engine.base import LearningReport
    from rlhfspec.runs.folder.learnt import LearntLine

app = typer.Typer(help="Train drafters, report what they learnt, and export them.", no_args_is_help=True)
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write.", show_default=False)]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
_MAX_TABLE_ROWS = 20


@app.callback()
def group() -> None:
    """Train, report and export drafters that learn (docs/generation.md#drafters-that-learn)."""


@app.command()
def train(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Policy: folder or hub id.", show_default=False)],
    data: Annotated[
        list[str],
        typer.Option("--data", metavar="FILE", help="Prompts, as in a job's dataset. Repeatable.", show_default=False),
    ],
    out: Out,
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", help="EAGLE-3 drafter to go on from: folder or hub id.  [default: a new one]"),
    ] = None,
    shape: Annotated[Literal["eagle3"], typer.Option("--shape", help="Kind of drafter.")] = "eagle3",
    column: Annotated[str, typer.Option("--column", help="Column that holds the prompts.")] = "prompt",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Stop after this many tokens.")] = 500_000,
    seconds: Annotated[float, typer.Option("--seconds", min=0.0, help="Stop after this many seconds.")] = 600.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum tokens per answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Sampling temperature.")] = 1.0,
    device: Annotated[str, typer.Option("--device", help="Torch device, such as cpu or cuda.")] = "cpu",
) -> None:
    """Train an EAGLE-3 drafter on the policy's answers, for model.drafter. Ctrl-C ends early and saves it."""
    from rlhfspec.engine.config import EngineConfig
    from rlhfspec.engine.distilling.before import AT_ONCE, begin, distil, drafter_of
    from rlhfspec.engine.params import SamplingParams
    from rlhfspec.huggingface.heads.eagle import is_eagle, save_head

    over = threading.Event()
    with exit_on_problems(), on_signals(over.set), StatusLine() as status:
        _refuse_taken(out)
        if drafter is not None and not is_eagle(drafter):
            raise InvalidRequest("--drafter", drafter, "is no EAGLE-3 drafter, and no other learns")
        status(f"reading {', '.join(data)}")
        prompts = _prompts(model, data, column)
        status(f"loading {model}")
        longest = max(map(len, prompts))
        config = EngineConfig(
            device=device, speculation="model", learning=0.0, profile=False, max_sequences=AT_ONCE,
            max_context=longest + max_tokens,
        )  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        engine = begin(model, drafter, config, prompts, params, is_over=over.is_set)
        report = distil(
            engine,
            prompts,
            params,
            tokens=tokens,
            seconds=seconds,
            is_over=over.is_set,
            said=lambda now: status(f"learnt from {now.num_tokens:,} tokens in {now.seconds:.0f} s: {_law(now)}"),
        )
        save_head(drafter_of(engine), out.absolute())
    typer.echo(f"{out}: learnt from {report.num_tokens:,} tokens in {report.seconds:.0f} s: {_law(report)}")


@app.command()
def report(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per recorded line.")] = False
) -> None:
    """Show what a run's drafters learnt: acceptance by depth, cost of a level, time spent and time saved."""
    from rlhfspec.runs.folder.learnt import learnt_lines

    with exit_on_problems():
        lines = list(learnt_lines(run))
        if not lines:
            raise _nothing_learnt(run)
    if as_json:
        from dataclasses import asdict

        for line in lines:
            typer.echo(json.dumps(asdict(line)))
        return
    wide_console().print(_table(lines))
    spent, saved = sum(line.seconds for line in lines), sum(line.saved_seconds for line in lines)
    typer.echo(f"learning took {spent:.1f} s of generator time and saved an estimated {saved:.1f} s")
    learnt = [line.weights_version for line in lines if line.num_tokens]
    if learnt:
        typer.echo(f"a drafter last learnt {max(line.weights_version for line in lines) - max(learnt)} steps ago")


@app.command()
def export(run: Run, out: Out) -> None:
    """Write a run's learnt drafter as a folder for another run, vLLM or SGLang."""
    from rlhfspec.runs.folder.learnt import LEARNT
    from rlhfspec.runs.folder.run_folder import RunFolder

    with exit_on_problems():
        folder = RunFolder(run)
        if not (run / LEARNT).is_dir() or not folder.job_file.exists():
            raise _nothing_learnt(run)
        _refuse_taken(out)
        from rlhfspec.engine.distilling.eagle_student import EagleStudent
        from rlhfspec.huggingface.heads.eagle import load_head, save_head
        from rlhfspec.job.file.paths import named_models
        from rlhfspec.training.checkpoint.learnt import read_learnt

        found, named = read_learnt(run / LEARNT), named_models(folder.job().spec.model)
        if found is None or "drafter" not in named:
            raise _nothing_learnt(run)
        student = EagleStudent(load_head(named["drafter"]))
        student.take(found[1])
        save_head(student.model, out.absolute())
    typer.echo(f"{out}: learnt from {found[0]:,} tokens")


def _nothing_learnt(run: Path) -> InvalidRequest:
    return InvalidRequest("RUN", str(run), "no drafter learnt in this run: generation.speculation.learning was off")


def _prompts(model: str, data: Iterable[str], column: str) -> list[tuple[int, ...]]:
    from rlhfspec.job import Dataset, Model
    from rlhfspec.training.data import Prompts, load_rows, load_tokenizer

    tokenizer = load_tokenizer(Model(path=model))
    found: list[tuple[int, ...]] = []
    for path in data:
        dataset = Dataset.model_validate({"path": path, "promptColumn": column})
        rows = load_rows(dataset)
        if column not in (first := rows.records[0]):
            raise InvalidRequest("--column", column, f"{path} has no such column; its columns: {', '.join(first)}")
        prompts = Prompts(rows, tokenizer, dataset, seed=0, prompts_per_step=1)
        found += [prompts[index].token_ids for index in range(len(prompts))]
    return found


def _refuse_taken(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InvalidRequest("--out", str(out), "already exists; choose another folder")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest("--out", str(out), f"cannot be created: {error.strerror}") from None


def _law(report: LearningReport) -> str:
    return f"law {shares(report.law_before) or '-'} -> {shares(report.law_now) or '-'} by depth, on unseen answers"


def _table(lines: list[LearntLine]) -> Table:
    """Return a row per version of the policy: sums over generators, and shares of the drafter that learnt most."""
    table = Table()
    for title in ("policy", "learnt from", "seconds", "saved", "law by depth", "accepted", "level", "a verification"):
        table.add_column(title, justify="right")
    versions = sorted({line.weights_version for line in lines})
    every = -(-len(versions) // _MAX_TABLE_ROWS)
    for version in versions[::-1][::every][::-1]:
        of_version = [line for line in lines if line.weights_version == version]
        newest = max(of_version, key=lambda line: line.version)
        tokens = newest.tokens_per_verification
        table.add_row(
            str(version),
            f"{newest.version:,}",
            f"{sum(line.seconds for line in of_version):.1f}",
            f"{sum(line.saved_seconds for line in of_version):.1f}",
            shares(newest.law) or "-",
            shares(newest.acceptance) or "-",
            "-" if newest.level_share is None else shares([newest.level_share]),
            "-" if tokens is None else f"{tokens:.2f}",
        )
    return table
