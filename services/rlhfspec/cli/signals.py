"""Handlers of Ctrl-C and SIGTERM that act at once, even while the main thread runs compiled code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

FAILED = 1  # exit codes; 2, of a wrong argument or job, is click's own
STOPPED = 130  # as a shell says of Ctrl-C
SHOW_CURSOR = b"\x1b[?25h"
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_heard: list[int] = []


@contextmanager
def on_signals(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a new thread on either signal until the block ends; an outer block then applies again."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    thread = threading.Thread(target=_hear, args=(reading, act), name="signals", daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written to by the system's handler itself
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
    """Return the name of the last signal that was acted on."""
    return "SIGTERM" if _heard[-1:] == [signal.SIGTERM] else "Ctrl-C"


def leave_at_once(message: str) -> NoReturn:
    """Exit without unwinding, after restoring the terminal from the live view."""
    if os.isatty(sys.stderr.fileno()):
        os.write(sys.stderr.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), f"\n{message}\n".encode())
    os._exit(STOPPED)
