"""Options and helpers shared by the benchmark commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlhfspec.cli.progress import StatusLine, wide_console
from rlhfspec.errors import InvalidRequest
from rlhfspec.job.choices.drafters import MADE_OF_THE_POLICY, SELF

Pair = Annotated[
    Literal["english", "library"],
    typer.Option(help="Tiny models to use: trained on templated English, or on real text (library)."),
]
Model = Annotated[
    str | None, typer.Option(help="Folder of the target model, or smollm2.  [default: the tiny 77M model]")
]
Draft = Annotated[
    str | None,
    typer.Option(help="Folder of the draft model, or self.  [default: none with --model, else the tiny one]"),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all measurements to this JSON file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Plot the result to this PNG.")]


def chosen(defaults: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Return the defaults, overridden by values that are not None.

    >>> chosen({"repeats": 1, "scale": 0.5}, repeats=4, seeds=None)
    {'repeats': 4, 'scale': 0.5}
    """
    return dict(defaults) | {name: value for name, value in given.items() if value is not None}


def names(text: str | None) -> tuple[str, ...] | None:
    """Split names at commas, or return None.

    >>> names("shm,tcp"), names(None)
    (('shm', 'tcp'), None)
    """
    return tuple(text.split(",")) if text else None


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Parse numbers separated by commas.

    >>> numbers("--threads", "1,2"), numbers("--threads", None)
    ((1, 2), None)
    """
    try:
        return tuple(map(int, text.split(","))) if text else None
    except ValueError as error:
        raise typer.BadParameter(f"{option}: numbers separated by commas, such as 1,2 (got {text!r})") from error


def show(
    results: Any,
    render: Callable[[Any], Any],
    json_file: Path | None,
    plot: Callable[[Any, Path], None] | None = None,
    plot_file: Path | None = None,
) -> None:
    """Print the results as a table, and write the requested files."""
    wide_console().print(render(results))
    if json_file is not None:
        json_file.write_text(results.to_json())
    if plot is not None and plot_file is not None:
        plot(results, plot_file)
        typer.echo(f"plot: {plot_file}")


def models(
    model: str | None, draft: str | None, status: StatusLine, *, tiny_target: str = "wide", pair: str = "english"
) -> tuple[str, str | None]:
    """Return the folders of target and draft model, those given or a pair of `scenarios.PAIRS`, made on first use."""
    from rlhfspec.tiny import ensure, smollm2

    if model is None and draft is not None:
        raise typer.BadParameter("--draft goes with --model: their vocabularies must be the same")
    if model is not None and model.startswith(smollm2.SMOLLM2):
        pair, model = model, None
    if model is not None:
        folder = None if draft in MADE_OF_THE_POLICY else draft
        for option, path in (("--model", model), ("--draft", folder)):
            if path is not None and not (Path(path) / "config.json").exists():
                raise typer.BadParameter(f"{option}: no model folder with a config.json (got {path!r})")
        return model, draft
    if pair.startswith("smollm2"):
        return str(checked(smollm2.ensure, report=status)), draft or SELF
    names = ("library-wide", "library-draft") if pair == "library" else (tiny_target, "draft")
    made = ensure(*names, report=status)
    target_path, draft_path = (str(getattr(made, name.replace("-", "_"))) for name in names)
    return target_path, draft_path


def checked(call: Any, **arguments: Any) -> Any:
    """Call a function, turning InvalidRequest into a one-line usage error."""
    try:
        return call(**arguments)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
