"""`rlhfspec run JOB`: trains, watched, into one folder; goes on with --resume."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rlhfspec.cli.job import check_made_here
from rlhfspec.cli.problems import FAILED, exit_on_problems
from rlhfspec.cli.progress import StatusLine, wide_console
from rlhfspec.cli.start import STOPPED
from rlhfspec.errors import DataExhausted, RLHFSpecError
from rlhfspec.job_file import read_job

if TYPE_CHECKING:
    from rich.console import Console

    from rlhfspec.cli.local import Run
    from rlhfspec.job import RLHFJob
    from rlhfspec.telemetry.manifest import Outcome

SHOW_CURSOR = b"\x1b[?25h"

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
    with exit_on_problems(), _leaving_at_once_on_ctrl_c():
        checked = read_job(job, overrides or [])
        check_made_here(checked, job)
        if int(os.environ.get("RANK", "0")) > 0:
            return _follow(checked)
        folder = out or Path("out") / checked.metadata.name
        outcome = _run(checked, job, overrides or [], folder, resume, console)
    if outcome != "completed":
        raise typer.Exit(STOPPED if outcome == "stopped" else FAILED)


def _resume_command(job: Path, overrides: list[str], out: Path, *, more_steps: int | None) -> str:
    """Ready to be pasted. A run goes on with its own job only, overrides included; a completed one needs more steps.

    >>> _resume_command(Path("my job.yaml"), ["training.seed=7"], Path("out/a"), more_steps=None)
    "rlhfspec run 'my job.yaml' --set training.seed=7 --out out/a --resume"
    >>> _resume_command(Path("job.yaml"), ["training.steps=2"], Path("out/a"), more_steps=4)
    'rlhfspec run job.yaml --set training.steps=4 --out out/a --resume'
    """
    if more_steps is not None:
        kept = [override for override in overrides if not override.startswith("training.steps=")]
        overrides = [*kept, f"training.steps={more_steps}"]
    sets = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["rlhfspec", "run", str(job), *sets, "--out", str(out), "--resume"])


def _run(job: RLHFJob, job_path: Path, overrides: list[str], out: Path, resume: bool, console: Console) -> Outcome:
    with ExitStack() as leaving:
        with StatusLine() as status:
            status("importing torch")
            from transformers.utils.logging import disable_progress_bar

            from rlhfspec.cli.local import Run, make_parts
            from rlhfspec.cli.tiny_paths import with_tiny_paths
            from rlhfspec.learning.distributed import joined
            from rlhfspec.telemetry.run_folder import RunFolder
            from rlhfspec.telemetry.view import View

            disable_progress_bar()  # type: ignore[no-untyped-call]
            view = View(job, console)
            RunFolder(out).check(job, resume=resume)
            ranks = leaving.enter_context(joined(**_patience(job)))
            parts = make_parts(with_tiny_paths(job, status), job_path.absolute().parent, status, ranks)
        run = leaving.enter_context(closing(Run(parts, RunFolder(out), view)))
        for line in run.begin(job, resume=resume):
            console.print(line, highlight=False)
        outcome, reason = _outcome_of(run)
        more_steps = 2 * job.spec.training.steps if outcome == "completed" and not reason else None
        again = _resume_command(job_path, overrides, out, more_steps=more_steps)
        run.finish(outcome, reason, resume_command=again, console=console)
        return outcome


@contextmanager
def _leaving_at_once_on_ctrl_c() -> Iterator[None]:
    """While parts are made and the summary is written; the stages listen for themselves. Where a signal may arrive in
    the middle of an import or a compiled library, raising would end in whatever that makes of it."""

    def leave(*_: object) -> None:
        _leave_at_once("stopped")

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(job: RLHFJob) -> None:
    """Ranks other than 0 train along until rank 0 says stop; signals are rank 0's business."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from rlhfspec.cli.tiny_paths import with_tiny_paths
    from rlhfspec.learning.distributed import follow, joined
    from rlhfspec.learning.learner import Learner

    with joined(**_patience(job)) as ranks:
        follow(Learner.from_spec(with_tiny_paths(job, lambda _: None).spec, ranks=ranks), ranks)


def _patience(job: RLHFJob) -> dict[str, float]:
    """Rank 0 is silent for as long as the other stages take for a step."""
    deadline = job.spec.roles.trainer.deadline_seconds
    return {"timeout_seconds": deadline, "silence_seconds": deadline + job.spec.roles.generator.deadline_seconds}


def _outcome_of(run: Run) -> tuple[Outcome, str]:
    """Runs the stages; how they ended."""
    try:
        asyncio.run(_stages(run))
    except DataExhausted as ended:
        return "completed", str(ended)
    except RLHFSpecError as error:
        failure = run.folder.path / "failure.txt"
        failure.write_text("".join(traceback.format_exception(error)))
        return "failed", f"{error}; the whole traceback is in {failure}"
    return ("stopped", "Ctrl-C") if run.is_unfinished else ("completed", "")


async def _stages(run: Run) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, run)
    await run.stages()


def _leave_at_once(message: str) -> NoReturn:
    """Nothing is unwound, so the terminal gets back here what the live view took."""
    if os.isatty(sys.stderr.fileno()):
        os.write(sys.stderr.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), f"\n{message}\n".encode())
    os._exit(STOPPED)


def _stop(run: Run) -> None:
    """The first time: an orderly end. The second time: now; the last checkpoint stands."""
    if run.stop.is_set():
        _leave_at_once("stopped at once; the last checkpoint stands")
    run.stop.set()
    run.say("stopping: what is being learnt is finished and saved; Ctrl-C once more leaves at once")
