"""Imported by every interpreter of a run under faults: leads TCP links of moves through `faults.links.LinkProxy`.

At SIGUSR1 a process writes down what each of its tasks waits for.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any

_connect = socket.create_connection


def _connected(address: tuple[str, int], *arguments: Any, **named: Any) -> socket.socket:
    if sys._getframe(1).f_globals.get("__name__") != "rlhfspec.moves.migration.links.tcp":
        return _connect(address, *arguments, **named)
    connection = _connect(("127.0.0.1", int(os.environ["FAULTS_LINK_PORT"])), *arguments, **named)
    connection.sendall(f"{address[0]} {address[1]}\n".encode())
    return connection


def _tell(*_: object) -> None:
    with open(os.path.join(os.environ["FAULTS_TOLD"], f"tasks-{os.getpid()}.txt"), "w") as file:
        for task in asyncio.all_tasks():
            task.print_stack(file=file)


socket.create_connection = _connected
signal.signal(signal.SIGUSR1, _tell)
