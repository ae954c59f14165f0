"""Process entry point that ends cleanly on Ctrl-C during imports and with hanging threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from rlhfspec.cli.signals import STOPPED
from rlhfspec.common.interpreter import refuse_or_begin_anew
from rlhfspec.kernels.malloc import tune_malloc


def main() -> None:
    refuse_or_begin_anew()
    tune_malloc()  # before torch, and before any thread
    try:
        from rlhfspec.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        if not others and not isinstance(ended.code, str):
            atexit._run_exitfuncs()
            _leave(code)
        if code and any(thread.daemon for thread in others):
            _leave(code)
        raise


def _leave(code: int) -> NoReturn:
    """Exit without unwinding the stack, which would abort the process during a computation."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
