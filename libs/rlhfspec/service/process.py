"""`python -m rlhfspec.STAGE --connections FILE --worker N`: one worker of one stage, in a process of its own.

What it needs beside its arguments stands in the connections file (`service.connections`); what its exit code says, in
`service.exits`. SIGTERM and SIGINT ask it to leave: it ends what it is at, hands the rest back, and exits with 0. A
second one ends it at once, and so does the first while it still loads. Of what ended it, its last log line tells.

Nothing heavy is imported before the arguments are read.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rlhfspec.job import RLHFJob
    from rlhfspec.service.connections import Connections

STARTED = "RLHFSPEC_WORKER"  # in the environment: by a supervisor, not by hand
PR_SET_PDEATHSIG = 1


def main(stage: str) -> NoReturn:
    arguments = _arguments(stage)
    end_with_the_supervisor()
    from rlhfspec.kernels.malloc import tune_malloc

    tune_malloc()  # before torch, and before any thread
    code = _run(stage, arguments.worker, arguments.connections)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed by now. Taking the interpreter apart would take seconds with torch in it, and abort the process
    # where a thread still computes.
    os._exit(code)


def end_with_the_supervisor() -> None:
    """The system kills what a supervisor started when that dies, also where its guardian died with it."""
    if STARTED in os.environ and sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _arguments(stage: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m rlhfspec.{stage}",
        description=f"One worker of the {stage} stage of a run: started by `rlhfspec run --processes`, or by hand to "
        "join one. SIGTERM asks it to leave. Exit codes: 0 done or left, 75 a server cannot be reached, 78 the same "
        "will happen again, 1 any other error.",
    )
    parser.add_argument(
        "--connections", type=Path, required=True, metavar="FILE", help="RUN/processes/connections.json"
    )
    parser.add_argument(
        "--worker", type=_number, required=True, metavar="N", help="its number among the stage's workers, from 0"
    )
    return parser.parse_args()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more (got {text!r})")
    return int(text)


def _run(stage: str, worker: int, connections_file: Path) -> int:
    import logging
    from contextlib import ExitStack

    from rlhfspec.errors import RLHFSpecError, StageFailed
    from rlhfspec.service import exits
    from rlhfspec.service.logs import configure
    from rlhfspec.service.supervisor import reason_of
    from rlhfspec.service.worker import StageWorker

    log = logging.getLogger("rlhfspec.service")
    with ExitStack() as leaving:
        leaving.enter_context(configure(job="", run="", stage=stage, worker=worker))
        try:
            connections, job = _read(stage, connections_file)
            _marked(connections.uid)
            leaving.enter_context(configure(job=job.metadata.name, run=connections.uid, stage=stage, worker=worker))
            if int(os.environ.get("RANK", "0")) > 0:  # torchrun started this process as one of several
                _follow(job)
            else:
                StageWorker(stage, worker, connections, job).run()
        except Exception as error:  # the process ends here: whatever it was, its last line says it
            cause = error.__cause__ if isinstance(error, StageFailed) and error.__cause__ is not None else error
            if not isinstance(cause, RLHFSpecError):
                log.error("what led to it", exc_info=cause)
            code = exits.code_of(cause)
            log.error("%s", reason_of(cause), extra={"fields": {"exit_code": code}})
            return code
    return exits.DONE


def _read(stage: str, connections_file: Path) -> tuple[Connections, RLHFJob]:
    from rlhfspec.errors import InvalidRequest
    from rlhfspec.loop import workers_of
    from rlhfspec.service.connections import Connections

    connections = Connections.read(connections_file)
    job = connections.job()
    if stage not in workers_of(job):
        raise InvalidRequest("stage", stage, f"this job runs {', '.join(workers_of(job))}")
    return connections, job


def _marked(uid: str) -> None:
    """Begins anew as a process of the run, where it was started by hand: its guardian ends it too."""
    from rlhfspec.servers.guardian import MARK

    if os.environ.get(MARK) != uid:
        os.execve(sys.executable, sys.orig_argv, os.environ | {MARK: uid})


def _follow(job: RLHFJob) -> None:
    """Ranks other than 0 train along until rank 0 says stop; signals are rank 0's business."""
    import signal
    from importlib import import_module

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import_module("rlhfspec.trainer.build").follow(job)
