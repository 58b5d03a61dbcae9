"""The port of a worker: accepts connections and performs their handshakes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gossamer.comm.tcp.frame import Hello, Refused, meet

HANDSHAKES = 64  # at once; the longest-running one makes room for the next
RETRY = 0.05  # seconds between attempts to accept while the process has no free descriptor
STRANGER = -1  # stands for the rank of a process that has not identified itself


class NotMember(Refused):
    """A valid worker that is not in the current epoch's membership."""


class Listener:
    """Accepts connections on `server` until `close`.

    Args:
        server: A listening socket.
        run: The id of the run; workers of other runs are refused.
        hello: Returns what this worker says about itself in a handshake.
        accept: Takes over a connection whose handshake succeeded, or raises Refused. Called in a thread of its own.
        refused: Called with (-1, reason) for every connection that was refused.
    """

    def __init__(
        self,
        server: socket.socket,
        run: bytes,
        hello: Callable[[], Hello],
        accept: Callable[[socket.socket, Hello], None],
        refused: Callable[[int, str], None],
    ):
        self._server, self._run = server, run
        self._hello, self._accept, self._refused = hello, accept, refused
        self._lock = threading.Lock()
        self._handshakes: list[socket.socket] = []  # oldest first
        self._stopped = False
        self.thread = threading.Thread(target=self._listen, name="gossamer-listen", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self._stopped = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.thread.join(timeout=1.0)

    def _listen(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed; or no descriptor is free, or the other side has disconnected already
                if not self._stopped:
                    time.sleep(RETRY)
                continue
            self._make_room(connection)
            # A thread each: a stranger that sends nothing must not keep others waiting.
            thread = threading.Thread(target=self._welcome, args=(connection,), name="gossamer-hello", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process cannot have more threads at the moment
                self._finish_handshake(connection)
                connection.close()

    def _make_room(self, connection: socket.socket) -> None:
        """Count one more handshake. A worker's handshake is short, so the oldest one is ended if there are many."""
        with self._lock:
            self._handshakes.append(connection)
            oldest = self._handshakes.pop(0) if len(self._handshakes) > HANDSHAKES else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread notices and closes it

    def _finish_handshake(self, connection: socket.socket) -> None:
        with self._lock, suppress(ValueError):
            self._handshakes.remove(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Identify the other side. Whatever a stranger sends can only end its own connection."""
        try:
            try:
                hello = meet(connection, self._hello(), first=False)
            finally:
                self._finish_handshake(connection)
            if hello.run != self._run.hex():
                raise Refused(f"a worker of run {hello.run!r} connected to run {self._run.hex()}")
            self._accept(connection, hello)
        except Exception as error:
            if not isinstance(error, OSError | NotMember):
                self._refused(STRANGER, str(error) if isinstance(error, Refused) else repr(error))
            connection.close()
