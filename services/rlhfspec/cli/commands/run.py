from __future__ import annotations

import asyncio
import os
import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfspec.cli.commands.job import Job, Set
from rlhfspec.cli.problems import exit_on_problems
from rlhfspec.cli.progress import StatusLine, wide_console
from rlhfspec.cli.signals import FAILED, STOPPED, leave_at_once, name_of_last, on_signals
from rlhfspec.common.ranks import rank_told
from rlhfspec.errors import EndedEarly, InvalidRequest, RLHFSpecError, StorageError
from rlhfspec.job.file import read_job
from rlhfspec.job.file.remarks import left_aside
from rlhfspec.job.file.secrets import shown_override
from rlhfspec.prepare.checks import check_engine, check_made_here

if TYPE_CHECKING:
    from rich.console import Console

    from rlhfspec.job import RLHFJob
    from rlhfspec.runs.folder.manifest import RunOutcome
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.runs.view.view import View
    from rlhfspec.supervisor.job_run import JobRun

Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Run folder.  [default: out/NAME-OF-THE-JOB]")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in the run folder.")]
Processes = Annotated[
    bool, typer.Option("--processes", help="Run every worker in a process of its own (docs/processes.md).")
]
Serve = Annotated[
    int | None,
    typer.Option(
        "--serve", metavar="PORT", min=0, max=65535, show_default=False,
        help="Answer OpenAI clients on this port while the policy trains (docs/serving.md); 0: any free port.",
    ),
]  # fmt: skip


def run(
    job: Job, overrides: Set = None, out: Out = None, resume: Resume = False, processes: Processes = False,
    serve: Serve = None,
) -> None:  # fmt: skip
    """Run a job. Ctrl-C finishes the step, writes a checkpoint and stops.

    All stages run in this process; --processes gives every worker a process of its own, restarted when it fails. Under
    torchrun, rank 0 runs the stages and all ranks share the training (docs/training.md).
    """
    console = wide_console()
    with exit_on_problems(), on_signals(lambda: leave_at_once("stopped")):  # the stages install their own handlers
        checked = read_job(job, overrides or [])
        if serve is not None:
            _refuse_to_serve(checked, serve, processes=processes)
        check_engine(checked)
        told = rank_told(os.environ)
        if processes and told.num_ranks > 1:
            problem = "starts the trainer's ranks itself (roles.trainer.ranksPerNode); do not use torchrun"
            raise InvalidRequest("--processes", f"WORLD_SIZE={told.num_ranks}", problem)
        folder = out or Path("out") / checked.metadata.name
        if told.rank > 0:
            return _follow(checked)
        aside = left_aside(checked)
        if aside is not None:
            console.print(f"{job}: {aside}", markup=False, highlight=False, soft_wrap=True)
        outcome = _run(checked, _Command(job, overrides or [], folder, resume, processes, serve), console)
    if outcome != "completed":
        raise typer.Exit(STOPPED if outcome == "stopped" else FAILED)


def _refuse_to_serve(job: RLHFJob, port: int, *, processes: bool) -> None:
    try:
        import_module("rlhfspec.door.server")  # with the packages of the extra `serve`
    except ModuleNotFoundError as error:
        problem = "needs a package that is not installed: pip install 'rlhfspec[run,serve]'"
        raise InvalidRequest("--serve", error.name, problem) from None
    are_several = job.spec.roles.generator.workers > 1 and not processes
    if job.spec.generation.engine.name != "own" or are_several:
        problem = "needs generation.engine: own and roles.generator.workers: 1; several generators need --processes"
        raise InvalidRequest("--serve", port, problem)


@dataclass(frozen=True, slots=True)
class _Command:
    job: Path
    overrides: list[str]
    out: Path
    resume: bool = False
    processes: bool = False
    serve: int | None = None

    def to_go_on(self, more_steps: int | None) -> str:
        """Return the command that resumes the run, without secrets; `more_steps` replaces training.steps.

        >>> _Command(Path("my job.yaml"), ["training.steps=2"], Path("out/a"), processes=True).to_go_on(4)
        "rlhfspec run --processes 'my job.yaml' --set training.steps=4 --out out/a --resume"
        """
        overrides = self.overrides
        if more_steps is not None:
            kept = [override for override in overrides if not override.startswith("training.steps=")]
            overrides = [*kept, f"training.steps={more_steps}"]
        sets = [word for override in overrides for word in ("--set", shown_override(override))]
        way = ["--processes"] if self.processes else []
        way += ["--serve", str(self.serve)] if self.serve is not None else []
        return shlex.join(["rlhfspec", "run", *way, str(self.job), *sets, "--out", str(self.out), "--resume"])


def _run(job: RLHFJob, command: _Command, console: Console) -> RunOutcome:
    from rlhfspec.runs.folder.run_folder import RunFolder
    from rlhfspec.runs.view.view import View

    folder, view = RunFolder(command.out), View(job, console)
    with ExitStack() as leaving:
        leaving.callback(folder.close)
        with ExitStack() as failing, StatusLine() as status:
            _begin(folder, job, command, view)
            failing.callback(folder.discard)
            with on_signals(lambda: _leave_before_it_began(folder)):
                run = _prepared(job, command, folder, view, status)
            leaving.callback(run.close)
            failing.callback(run.abandon)
            with on_signals(lambda: _leave_before_it_began(folder, run)):
                run.build(status)
            failing.pop_all()
        run.begin()
        outcome, reason = _outcome_of(run)
        more_steps = 2 * job.spec.training.steps if outcome == "completed" and not reason else None
        try:
            run.finish(outcome, reason, resume_command=command.to_go_on(more_steps), console=console)
        except (StorageError, OSError) as error:  # keep the reason that ended the run
            problem = f"{outcome}: {reason}; " if reason else f"{outcome}; "
            raise StorageError(command.out, f"{problem}the outcome cannot be written: {error}") from error
        return outcome


def _begin(folder: RunFolder, job: RLHFJob, command: _Command, view: View) -> None:
    """Open the run folder before anything heavy is imported."""
    from rlhfspec.messages.loop import workers_of
    from rlhfspec.messages.servers.scratch import end_run_in

    processes = workers_of(job, is_served=command.serve is not None) if command.processes else {}
    if folder.begin(job, resume=command.resume, processes=processes):
        view.say("manifest.json could not be read and was replaced by a new one")
    end_run_in(folder.processes)
    view.progress.history(folder.steps(), folder.evaluations())


def _prepared(job: RLHFJob, command: _Command, folder: RunFolder, view: View, status: StatusLine) -> JobRun:
    check_made_here(job, command.job)  # imports the generators of the data
    kind = _process_run() if command.processes else _local_run(status)
    from rlhfspec.messages.servers.scratch import end_dead_runs
    from rlhfspec.prepare.tiny_paths import with_tiny_paths

    for uid in end_dead_runs():
        status(f"removing what is left of run {uid}, whose supervisor died")
    run = kind(with_tiny_paths(job, status), command.job.absolute().parent, folder, view)
    run.serve_port = command.serve
    return run


def _local_run(status: StatusLine) -> type[JobRun]:
    status("importing torch")
    from transformers.utils.logging import disable_progress_bar

    from rlhfspec.cli.local import LocalRun

    disable_progress_bar()  # type: ignore[no-untyped-call]
    return LocalRun


def _process_run() -> type[JobRun]:
    try:
        from rlhfspec.supervisor.run import ProcessRun
    except ImportError as error:
        problem = f"needs {error.name}: pip install 'rlhfspec[processes]'"
        raise InvalidRequest("--processes", True, problem) from None
    return ProcessRun


def _leave_before_it_began(folder: RunFolder, run: JobRun | None = None) -> None:
    if run is not None:
        run.abandon()
    folder.discard()
    leave_at_once("stopped")


def _follow(job: RLHFJob) -> None:
    from rlhfspec.prepare.tiny_paths import with_tiny_paths
    from rlhfspec.trainer.build import follow

    follow(with_tiny_paths(job, lambda _: None))


def _outcome_of(run: JobRun) -> tuple[RunOutcome, str]:
    try:
        run.runner.run(_stages(run))
    except EndedEarly as ended:
        return "completed", str(ended)
    except (RLHFSpecError, OSError) as error:
        from rlhfspec.runs.view.summary import kept_traceback

        return "failed", f"{error}; {kept_traceback(run.folder, error)}"
    return ("stopped", name_of_last()) if run.is_unfinished else ("completed", "")


async def _stages(run: JobRun) -> None:
    loop = asyncio.get_running_loop()
    with on_signals(lambda: loop.call_soon_threadsafe(_stop, run)):
        await run.stages()


def _stop(run: JobRun) -> None:
    """Stop the run gracefully at the first call, and at once at the second."""
    if run.stop.is_set():
        leave_at_once("stopped at once; the last checkpoint is kept")
    run.stop.set()
    run.say("stopping: finishing and saving the current step; press Ctrl-C again to stop at once")
