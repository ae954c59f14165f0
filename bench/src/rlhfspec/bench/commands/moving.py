"""`rlhfspec bench rebalance` and `rlhfspec bench migrate`: costs and gains of moves."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from rlhfspec.bench.commands.options import (
    Draft,
    JsonFile,
    Model,
    PlotFile,
    checked,
    chosen,
    models,
    names,
    numbers,
    show,
)
from rlhfspec.cli.progress import StatusLine

# Rough results in three minutes.
QUICK_REBALANCE: dict[str, Any] = {"decoding": ("adaptive",), "seeds": 1, "repeats": 2, "scale": 0.5}

QUICK_MIGRATE: dict[str, Any] = {"links": ("shm", "tcp"), "tokens": (512, 1024), "repeats": 4, "moves_per_stage": 2}


def rebalance(
    model: Model = None,
    draft: Draft = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run one seed with short responses; done within minutes.")
    ] = False,
    workloads: Annotated[
        str | None, typer.Option(help="Workloads, from skew, groups, independent.  [default: all]")
    ] = None,
    decoding: Annotated[str | None, typer.Option(help="Decoding, from adaptive, plain.  [default: both]")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Policies to compare, from dealt, pulled, ours, clairvoyant.  [default: all]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds of each workload.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of repetitions of every seed, with policies interleaved.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time a stage on two generators of one core each: dealt, pulled, rebalanced, or dealt with known lengths."""
    from rlhfspec.bench.moving.rebalancing.plot import plot
    from rlhfspec.bench.moving.rebalancing.rebalance import DifferentTokens, RebalanceBenchmark, RebalanceSettings
    from rlhfspec.bench.moving.rebalancing.report import render

    given = chosen(
        QUICK_REBALANCE if quick else {},
        workloads=names(workloads),
        decoding=names(decoding),
        arms=names(arms),
        seeds=seeds,
        repeats=repeats,
    )
    with StatusLine() as status:
        target_path, draft_path = models(model, draft, status)
        settings = checked(RebalanceSettings, model=target_path, draft=draft_path, dtype=dtype, **given)
        benchmark = RebalanceBenchmark(settings, report=status)
        try:
            results = checked(benchmark.run)
        except DifferentTokens as difference:
            typer.echo(str(difference), err=True)
            raise typer.Exit(1) from difference
    show(results, render, json_file, plot, plot_file)


def migrate(
    model: Model = None,
    draft: Draft = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure few moves of one length; done within minutes.")
    ] = False,
    links: Annotated[
        str | None, typer.Option(help="Links, from shm, tcp, nixl, torch.  [default: all that are installed]")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths of the moved sequence in tokens.  [default: 512,1024,2000]")
    ] = None,
    decoding: Annotated[str | None, typer.Option(help="Decoding, from plain, drafts.  [default: both]")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of moves of each combination.")] = None,
    large_kv: Annotated[
        bool,
        typer.Option(
            help="Also measure a model with 65 KB of KV a token (67 MB at 1,024 tokens), without speculation."
        ),
    ] = True,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time moves between two generators of one core each that both decode others: pause, gap and CPU by link."""
    from rlhfspec.bench.moving.migrating.migrate import MigrateBenchmark, MigrateSettings
    from rlhfspec.bench.moving.migrating.plot import plot
    from rlhfspec.bench.moving.migrating.report import render

    given = chosen(
        QUICK_MIGRATE if quick else {},
        links=names(links),
        tokens=numbers("--tokens", tokens),
        decoding=names(decoding),
        repeats=repeats,
    )
    with StatusLine() as status, TemporaryDirectory() as folder:
        target_path, draft_path = models(model, draft, status)
        large_path = large_kv_folder(Path(folder)) if large_kv else None
        settings = checked(
            MigrateSettings, model=target_path, draft=draft_path, large_kv=large_path, dtype=dtype, **given
        )
        results = checked(MigrateBenchmark(settings, report=status).run)
    show(results, render, json_file, plot, plot_file)


def large_kv_folder(folder: Path) -> str:
    """Save an untrained model whose KV cache has many bytes per token, and return its folder."""
    from rlhfspec.tiny import large_kv_model
    from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

    large_kv_model(vocab_size=VOCAB_SIZE).save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    return str(folder)
