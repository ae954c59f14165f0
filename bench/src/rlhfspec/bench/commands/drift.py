"""`rlhfspec bench drift`: a frozen drafter and a learning one while the policy is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfspec.bench.commands.options import JsonFile, PlotFile, show
from rlhfspec.cli.progress import StatusLine


def drift(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job on sums whose policy is trained.")] = Path(
        "examples/grpo.yaml"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 30,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of step time that is learnt for.")] = 0.02,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the policy.  [default: the job's]")
    ] = None,
    speculation: Annotated[str, typer.Option(help="Speculation mode of both.")] = "adaptive",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Train a policy, and generate every step's responses with a drafter that learns and with one that does not."""
    with StatusLine() as status:
        from rlhfspec.bench.drifting.drift import DriftSettings, measure
        from rlhfspec.bench.drifting.report import plot, render
        from rlhfspec.tiny import ensure

        made = ensure("sums", "sums-draft", report=status)
        settings = DriftSettings(
            job=job, model=str(made.sums), draft=str(made.sums_draft), steps=steps, share=share,
            speculation=speculation, learning_rate=learning_rate,
        )  # fmt: skip
        results = measure(settings, status)
    show(results, render, json_file, plot, plot_file)
