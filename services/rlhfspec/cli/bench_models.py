"""Which models a benchmark runs, and user errors as one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlhfspec.cli.progress import StatusLine
from rlhfspec.errors import InvalidRequest

Pair = Annotated[
    Literal["english", "library"], typer.Option(help="Which tiny models: of templated English, or of real text.")
]
Model = Annotated[str | None, typer.Option(help="Folder of the target; without it, the tiny 77M model.")]
Draft = Annotated[str | None, typer.Option(help="Folder of the draft model; without it, the tiny draft.")]


def models(
    model: str | None, draft: str | None, status: StatusLine, *, tiny_target: str = "wide", pair: str = "english"
) -> tuple[str, str]:
    """The folders given, or a tiny pair, made when it is not there yet."""
    if (model is None) != (draft is None):
        raise typer.BadParameter("--model and --draft go together: their vocabularies must be the same")
    if model is not None and draft is not None:
        for option, path in (("--model", model), ("--draft", draft)):
            if not (Path(path) / "config.json").exists():
                raise typer.BadParameter(f"{option}: no model folder with a config.json (got {path!r})")
        return model, draft
    from rlhfspec.tiny import ensure

    names = ("library-wide", "library-draft") if pair == "library" else (tiny_target, "draft")
    made = ensure(*names, report=status)
    target_path, draft_path = (str(getattr(made, name.replace("-", "_"))) for name in names)
    return target_path, draft_path


def checked(call: Any, **arguments: Any) -> Any:
    """User errors are one line that names the field to fix, never a traceback."""
    try:
        return call(**arguments)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
