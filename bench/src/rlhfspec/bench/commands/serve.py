"""`rlhfspec bench serve`: chats with a policy beside rollouts, and against vLLM's server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rlhfspec.bench.commands.options import Draft, JsonFile, PlotFile, checked, chosen, models, names, show
from rlhfspec.cli.progress import StatusLine

# Rough results in three minutes.
QUICK_SERVE: dict[str, Any] = {"rate": 4.0, "chats": 20, "num_tokens": 24, "repeats": 2}


def serve(
    model: Annotated[str, typer.Option(help="Folder of the target model, or smollm2.")] = "smollm2",
    draft: Draft = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a small model and few chats; done within minutes.")
    ] = False,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Modes: alone,rollouts,priority,equal,vllm-alone,vllm-rollouts,vllm-priority.  [default: all]"
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Number of chats that arrive in a second.")] = None,
    chats: Annotated[int | None, typer.Option(min=1, help="Number of chats in a repetition.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, max=256, help="Longest answer in tokens.")] = None,
    ttft: Annotated[float, typer.Option(help="Target of the time to the first token, in milliseconds.")] = 1000,
    tpot: Annotated[float, typer.Option(help="Target of the time per output token, in milliseconds.")] = 100,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of interleaved repetitions.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads of an engine.")] = 1,
    dtype: Annotated[str, typer.Option(help="Data type: bfloat16 or float32.")] = "bfloat16",
    vllm_python: Annotated[
        str | None, typer.Option(help="Python interpreter of an environment with vLLM.", envvar="RLHFSPEC_VLLM_PYTHON")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time chats over HTTP alone, beside rollouts with and without priority, and with vLLM's server."""
    from rlhfspec.bench.serving.report import plot, render
    from rlhfspec.bench.serving.run import DifferentAnswers, ServeBenchmark, ServeSettings

    given = chosen(
        QUICK_SERVE if quick else {}, modes=names(modes), rate=rate, chats=chats, num_tokens=tokens, repeats=repeats
    )
    with StatusLine() as status:
        target_path, draft_path = models(
            None if quick and model == "smollm2" else model, draft, status, tiny_target="target"
        )
        settings = checked(
            ServeSettings, model=target_path, draft=draft_path, ttft=ttft / 1000, tpot=tpot / 1000,
            num_threads=threads, dtype=dtype, vllm_python=vllm_python, **given,
        )  # fmt: skip
        try:
            results = checked(ServeBenchmark(settings, report=status).run)
        except DifferentAnswers as difference:
            typer.echo(str(difference), err=True)
            raise typer.Exit(1) from difference
    show(results, render, json_file, plot, plot_file)
