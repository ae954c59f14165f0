from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine
from rlhfspec.errors import InvalidRequest

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
    from rlhfspec.runs.folder.choosing import best_or_last, chosen
    from rlhfspec.runs.folder.run_folder import RunFolder

    folder = RunFolder(run)
    with exit_on_problems(), StatusLine() as status:
        if not folder.job_file.exists():
            raise InvalidRequest("RUN", str(run), "is not a run folder: job.yaml is missing")
        choice = best_or_last(folder) if step is None else chosen(folder, step)
        status("importing torch")
        from rlhfspec.prepare.tiny_paths import with_tiny_paths
        from rlhfspec.training.checkpoint.export import export_checkpoint
        from rlhfspec.training.data import load_tokenizer

        model = with_tiny_paths(folder.job(), status).spec.model
        status(f"writing the policy of step {choice.step}")
        written = out or folder.export
        export_checkpoint(folder.checkpoint(choice.step), model, written, tokenizer=load_tokenizer(model))
        if out is None:
            folder.note_export(str(choice))
    typer.echo(f"{written}: {choice}")
