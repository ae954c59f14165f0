"""`rlhfspec run JOB`: trains, watched, into one folder; goes on with --resume."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.cli.exit_codes import FAILED, STOPPED
from rlhfspec.cli.job import check_made_here
from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine, wide_console
from rlhfspec.cli.signals import leave_at_once, on_signals
from rlhfspec.errors import DataExhausted, RLHFSpecError, StorageError
from rlhfspec.job_file import read_job
from rlhfspec.job_file.secrets import shown_override

if TYPE_CHECKING:
    from rich.console import Console

    from rlhfspec.cli.local import LocalRun
    from rlhfspec.job import RLHFJob
    from rlhfspec.telemetry.manifest import RunOutcome

Job = Annotated[Path, typer.Argument(metavar="JOB", help="A job file (rlhfspec init writes one).", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field of spec, such as training.steps=3. Repeatable."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The run's folder.  [default: out/NAME-OF-THE-JOB]")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")]


def run(job: Job, overrides: Set = None, out: Out = None, resume: Resume = False) -> None:
    """Train: every stage in this process. Ctrl-C ends the step, writes a checkpoint and stops.

    Launched by torchrun, rank 0 runs the stages and all ranks share the training (docs/training.md).
    """
    console = wide_console()
    with exit_on_problems(), on_signals(lambda: leave_at_once("stopped")):  # the stages listen for themselves
        checked = read_job(job, overrides or [])
        check_made_here(checked, job)
        if int(os.environ.get("RANK", "0")) > 0:  # torchrun started this process as one of several
            return _follow(checked)
        folder = out or Path("out") / checked.metadata.name
        outcome = _run(checked, job, overrides or [], folder, resume, console)
    if outcome != "completed":
        raise typer.Exit(STOPPED if outcome == "stopped" else FAILED)


def _resume_command(job: Path, overrides: list[str], out: Path, *, more_steps: int | None) -> str:
    """To be pasted (secrets are left out). A run goes on with its own overrides only; a completed one needs more steps.

    >>> _resume_command(Path("my job.yaml"), ["training.seed=7"], Path("out/a"), more_steps=None)
    "rlhfspec run 'my job.yaml' --set training.seed=7 --out out/a --resume"
    >>> _resume_command(Path("job.yaml"), ["training.steps=2"], Path("out/a"), more_steps=4)
    'rlhfspec run job.yaml --set training.steps=4 --out out/a --resume'
    """
    if more_steps is not None:
        kept = [override for override in overrides if not override.startswith("training.steps=")]
        overrides = [*kept, f"training.steps={more_steps}"]
    sets = [word for override in overrides for word in ("--set", shown_override(override))]
    return shlex.join(["rlhfspec", "run", str(job), *sets, "--out", str(out), "--resume"])


def _run(job: RLHFJob, job_path: Path, overrides: list[str], out: Path, resume: bool, console: Console) -> RunOutcome:
    with ExitStack() as leaving:
        with StatusLine() as status:
            status("importing torch")
            from transformers.utils.logging import disable_progress_bar

            from rlhfspec.cli.local import LocalRun
            from rlhfspec.cli.tiny_paths import with_tiny_paths
            from rlhfspec.telemetry.run_folder import RunFolder
            from rlhfspec.telemetry.view import View

            disable_progress_bar()  # type: ignore[no-untyped-call]
            folder, view = RunFolder(out), View(job, console)
            folder.check(job, resume=resume)
            run = LocalRun(with_tiny_paths(job, status), job_path.absolute().parent, folder, view)
            leaving.callback(run.close)
            run.build(status)
        run.begin(job, resume=resume)
        outcome, reason = _outcome_of(run)
        more_steps = 2 * job.spec.training.steps if outcome == "completed" and not reason else None
        again = _resume_command(job_path, overrides, out, more_steps=more_steps)
        try:
            run.finish(outcome, reason, resume_command=again, console=console)
        except (StorageError, OSError) as error:  # what ended the run is said all the same
            problem = f"{outcome}: {reason}; " if reason else f"{outcome}; "
            raise StorageError(out, f"{problem}its end cannot be written down: {error}") from error
        return outcome


def _follow(job: RLHFJob) -> None:
    """Ranks other than 0 train along until rank 0 says stop; signals are rank 0's business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from rlhfspec.cli.tiny_paths import with_tiny_paths
    from rlhfspec.trainer.build import follow

    follow(with_tiny_paths(job, lambda _: None))


def _outcome_of(run: LocalRun) -> tuple[RunOutcome, str]:
    """Runs the stages; how they ended."""
    try:
        asyncio.run(_stages(run))
    except DataExhausted as ended:
        return "completed", str(ended)
    except (RLHFSpecError, OSError) as error:
        return "failed", f"{error}; {_kept_traceback(run, error)}"
    return ("stopped", "Ctrl-C") if run.is_unfinished else ("completed", "")


def _kept_traceback(run: LocalRun, error: Exception) -> str:
    failure = run.folder.path / "failure.txt"
    try:
        failure.write_text("".join(traceback.format_exception(error)))
    except OSError as full:
        return f"{failure} cannot be written: {full.strerror}"
    return f"the whole traceback is in {failure}"


async def _stages(run: LocalRun) -> None:
    loop = asyncio.get_running_loop()
    with on_signals(lambda: loop.call_soon_threadsafe(_stop, run)):
        await run.stages()


def _stop(run: LocalRun) -> None:
    """The first time: an orderly end. The second time: now; the last checkpoint stands."""
    if run.stop.is_set():
        leave_at_once("stopped at once; the last checkpoint stands")
    run.stop.set()
    run.say("stopping: what is being learnt is finished and saved; Ctrl-C once more leaves at once")
