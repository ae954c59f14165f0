"""Launcher of a program that is killed when its parent dies: python -I -S attached.py PARENT PROGRAM ARGUMENT ...

The parent-death signal survives exec. Only the standard library is imported, to start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 126  # as shells report it


def attached(command: Sequence[str]) -> list[str]:
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started it has already ended")
    try:
        os.execv(program, [program, *arguments])
    except OSError as error:
        print(f"{program} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main()
