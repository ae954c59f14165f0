"""Handlers of Ctrl-C and SIGTERM that act at once, even while compiled code runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

FAILED = 1  # exit codes; click itself uses 2 for a wrong argument or job
STOPPED = 130  # a shell's code for Ctrl-C
SHOW_CURSOR = b"\x1b[?25h"
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_heard: list[int] = []


@contextmanager
def on_signals(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a new thread on SIGINT or SIGTERM inside the block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_hear, args=(reading, act), name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # the C-level handler writes to it
    handlers = {number: signal.signal(number, lambda *_: None) for number in _NUMBERS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def _hear(reading: int, act: Callable[[], object]) -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number in _NUMBERS:
                _heard.append(number)
                act()


def name_of_last() -> str:
    return "SIGTERM" if _heard[-1:] == [signal.SIGTERM] else "Ctrl-C"


def leave_at_once(message: str) -> NoReturn:
    """Restore the terminal, print the message and exit without unwinding."""
    if os.isatty(sys.stderr.fileno()):
        os.write(sys.stderr.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), f"\n{message}\n".encode())
    os._exit(STOPPED)
