"""`python -m rlhfspec.STAGE --connections FILE --worker N`: one worker of a stage in its own process.

SIGTERM asks it to finish and exit with 0; a second one, or one during loading, ends it at once.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlhfspec.common.gpus import see_only
from rlhfspec.common.interpreter import refuse_or_begin_anew

if TYPE_CHECKING:
    from rlhfspec.job import RLHFJob
    from rlhfspec.messages.access.connections import Connections

STARTED = "RLHFSPEC_WORKER"  # environment variable set by a supervisor
PR_SET_PDEATHSIG = 1
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGKILL}
_LEFT_EARLY_LINE = b'{"level": "info", "message": "left: before it had begun", "exit_code": 0}\n'


def main(stage: str) -> NoReturn:
    refuse_or_begin_anew()
    arguments = _arguments(stage)
    leave_when_asked_to()
    _ask_itself_for_nothing()
    end_with_the_supervisor()
    from rlhfspec.kernels.malloc import tune_malloc

    tune_malloc()  # before torch, and before any thread
    see_only(arguments.gpus, os.environ)
    if arguments.threads is not None:
        compute_with(arguments.threads)
    code = _run(stage, arguments.worker, arguments.connections)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Interpreter shutdown with torch takes seconds, and aborts if a thread still computes.
    os._exit(code)


def leave_when_asked_to(said: Callable[[], object] = lambda: os.write(2, _LEFT_EARLY_LINE)) -> None:
    """Call `said` and exit on SIGTERM or SIGINT, also as PID 1, until the event loop handles these signals."""

    def leave(number: int, frame: object) -> None:
        said()
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _ask_itself_for_nothing() -> None:
    """Make signals to this process itself raise, because a reward's SIGTERM would look like a request to leave."""
    own = os.getpid()

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.kill", "os.killpg") and arguments[1] in ENDING and os.getpid() == own:
            whom, number = arguments
            if whom in (own, 0, -1, -os.getpgrp()) or (event == "os.killpg" and whom == os.getpgrp()):
                name = signal.Signals(number).name
                raise RuntimeError(f"{name} sent to its own process: raise an error to report a failure")

    sys.addaudithook(refuse)


def end_with_the_supervisor() -> None:
    if STARTED in os.environ and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _arguments(stage: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m rlhfspec.{stage}",
        description=f"One worker of the {stage} stage of a run: started by `rlhfspec run --processes`, or by hand to "
        "join one. SIGTERM asks it to leave. Exit codes: 0 done or left, 75 a server cannot be reached, 78 a restart "
        "would fail again, 1 any other error.",
    )
    parser.add_argument(
        "--connections", type=Path, required=True, metavar="FILE", help="RUN/processes/connections.json"
    )
    parser.add_argument(
        "--worker", type=_number, required=True, metavar="N", help="number of the worker within its stage, from 0"
    )
    parser.add_argument(
        "--gpus", metavar="LIST", help="the only GPUs it sees, one per rank (default: CUDA_VISIBLE_DEVICES)"
    )
    parser.add_argument(
        "--threads", type=_number, metavar="N", help="threads of torch (default: OMP_NUM_THREADS, or all cores)"
    )
    return parser.parse_args()


def compute_with(num_threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch

    torch.set_num_threads(num_threads)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more (got {text!r})")
    return int(text)


def _run(stage: str, worker: int, connections_file: Path) -> int:
    from importlib import import_module

    from rlhfspec.common.ranks import rank_told
    from rlhfspec.messages.access.connections import Connections
    from rlhfspec.stage.logs import configure
    from rlhfspec.worker.last_words import Ending, end_file, leaves_at_once
    from rlhfspec.worker.mirror import mirrored
    from rlhfspec.worker.worker import StageWorker

    leave_when_asked_to(lambda: leaves_at_once("before it had begun"))
    with configure(job="", run="", stage=stage, worker=worker), Ending() as ending:
        connections = Connections.read(connections_file)
        _marked(connections.uid)
        follows = rank_told(os.environ).rank > 0  # torchrun started it as one of several ranks
        mirror = mirrored(connections, stage, worker, follows=follows)
        job = _job_of(stage, connections)
        with configure(job=job.metadata.name, run=connections.uid, stage=stage, worker=worker):
            if follows:
                import_module(f"rlhfspec.{stage}.build").follow(job)  # until rank 0 stops it
                return ending.code
            if connections.activity_folder is not None:
                ending.file = end_file(connections.activity_folder / f"{stage}-{worker}")
            try:
                ending.said = StageWorker(stage, worker, connections, job, mirror).run()
            finally:
                if mirror is not None:
                    mirror.try_to_send()
    return ending.code


def _job_of(stage: str, connections: Connections) -> RLHFJob:
    from rlhfspec.errors import InvalidRequest
    from rlhfspec.messages.loop import workers_of

    job = connections.job()
    workers = workers_of(job, is_served=connections.serve_port is not None)
    if stage not in workers:
        raise InvalidRequest("stage", stage, f"this job runs {', '.join(workers)}")
    return job


def _marked(uid: str) -> None:
    """Re-execute a hand-started worker with the run's uid in its environment, by which guardians find it."""
    from rlhfspec.messages.servers.guardian import MARK

    if os.environ.get(MARK) != uid:
        os.execve(sys.executable, sys.orig_argv, os.environ | {MARK: uid})
