from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.errors import InvalidRequest

if TYPE_CHECKING:
    from rlhfspec.runs.folder.choosing import Choice
    from rlhfspec.runs.folder.run_folder import RunFolder

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
Step = Annotated[
    str | None,
    typer.Option(
        "--step", metavar="N|last", help="Checkpoint to export.  [default: the best evaluated one, or else the last]"
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="Folder to write.  [default: RUN/export]")]


def export(run: Run, step: Step = None, out: Out = None) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, and print which checkpoint it is."""
    from rlhfspec.runs.folder.run_folder import RunFolder

    with exit_on_problems(), StatusLine() as status:
        folder = RunFolder(run)
        if not folder.job_file.exists():
            raise InvalidRequest("RUN", str(run), "is not a run folder: job.yaml is missing")
        choice = write_policy(folder, status, step=step, out=out)
    typer.echo(f"{out or folder.export}: {choice}")


def write_policy(folder: RunFolder, status: StatusLine, *, step: str | None = None, out: Path | None = None) -> Choice:
    """Write a checkpoint's policy, by default the best one's into RUN/export, and return which checkpoint it is."""
    from rlhfspec.runs.folder.choosing import best_or_last, chosen

    choice = best_or_last(folder) if step is None else chosen(folder, step)
    status("importing torch")
    from rlhfspec.prepare.tiny_paths import with_tiny_paths
    from rlhfspec.training.checkpoint.export import export_checkpoint
    from rlhfspec.training.data import load_tokenizer

    model = with_tiny_paths(folder.job(), status).spec.model
    status(f"writing the policy of step {choice.step}")
    export_checkpoint(folder.checkpoint(choice.step), model, out or folder.export, tokenizer=load_tokenizer(model))
    if out is None:
        folder.note_export(str(choice))
    return choice
