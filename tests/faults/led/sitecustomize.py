"""Hook of every interpreter of a run under faults: routes TCP links through `faults.links.LinkProxy`."""

import os
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


socket.create_connection = _connected
