"""Where sources connect: one thread for who listens and one for each connection, all ended and joined by `close`."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import SECONDS
from rlhfspec.moves.migration.links.frames import welcome

_MOST_CONNECTIONS = 128
_MOST_STRANGERS = 16  # who have not yet shown that they know the token
_PAUSE_SECONDS = 0.1  # when there are no files left to open


class Door:
    """`serve(connection)` runs in a thread of the connection until it returns or raises LinkError."""

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        serve: Callable[[socket.socket], None],
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self._listening = listening
        self._token = token
        self._serve = serve
        self._tls = tls
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._strangers: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="link door", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads = [self._accepting, *self._connections]
            for each in (self._listening, *self._connections.values()):
                _shut(each)
        for thread in threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # who connected is gone already, or we close
                self._closed.wait(_PAUSE_SECONDS)
                continue
            with self._lock:
                is_full = len(self._connections) >= _MOST_CONNECTIONS or len(self._strangers) >= _MOST_STRANGERS
                if self._closed.is_set() or is_full:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._run, args=(connection,), name="link", daemon=True)
                self._strangers.add(thread)
                self._connections[thread] = connection
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        this = threading.current_thread()
        try:
            connection.settimeout(self._seconds)
            if self._tls is not None:
                with self._lock:  # from here on it is the wrapped one that a close must shut
                    connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                    self._connections[this] = connection
                connection.do_handshake()
            welcome(connection, self._token, timeout=self._seconds)
            self._strangers.discard(this)
            self._serve(connection)
        except (LinkError, OSError):
            pass  # whoever waits for a range was told by `serve`; the source sees its connection end
        finally:
            with self._lock:
                self._strangers.discard(this)
                self._connections.pop(this, None)
                _shut(connection)
            connection.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)  # wakes who waits on it
