"""A network partition: a TCP proxy that stops reading, with connections open and silent."""

import socket
import threading
from contextlib import suppress
from typing import Self


class Proxy:
    """Proxy between a process and a server. `cut` is silent: it closes and refuses nothing.

    >>> with Proxy("127.0.0.1", 4222) as proxy:
    ...     proxy.cut()
    ...     proxy.heal()
    """

    piece = 1 << 16  # bytes passed on at a time, at most

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._whole = threading.Event()
        self._whole.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._whole.set()
        for each in (self._listening, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._accepting.join(10.0)

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = self._reach(near)
            except (OSError, ValueError):
                near.close()
                continue
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _reach(self, near: socket.socket) -> socket.socket:
        return socket.create_connection(self._server)

    def _passed(self, piece: bytes) -> bytes:
        """Return the bytes to pass on, once they pass."""
        return piece

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while True:
                self._whole.wait()
                piece = one.recv(self.piece)
                self._whole.wait()  # what came after the cut is lost to the other side until it is healed
                if not piece:
                    break
                other.sendall(self._passed(piece))
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        one.close()  # else what a sender still has would fill its buffer
