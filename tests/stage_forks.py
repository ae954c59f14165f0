"""Fork server of stages' processes, which prints exit codes: python stage_forks.py STAGE=CONNECTIONS ..."""

import gc
import os
import runpy
import sys
from importlib import import_module

from rlhfspec.supervisor.launcher import STAGES_NEED
from rlhfspec.worker.process import STARTED

if __name__ == "__main__":
    for module in STAGES_NEED:
        import_module(module)
    gc.freeze()
    stages = {}
    for argument in sys.argv[1:]:
        stage, _, connections = argument.partition("=")
        if (pid := os.fork()) == 0:
            os.environ[STARTED] = f"{stage}-0"
            sys.argv = [stage, "--connections", connections, "--worker", "0"]
            runpy.run_module(f"rlhfspec.{stage}", run_name="__main__")
        stages[pid] = stage
    while stages:
        pid, status = os.wait()
        print(stages.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
