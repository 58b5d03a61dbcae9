"""A worker that is asked to leave by a signal: spot machines, Kubernetes and Slurm send SIGTERM and kill later.

Note [Why a thread hears the signals]: Python runs a signal handler between two of its instructions in the main thread,
so a step that is one long call of C++ code would use up the grace period. The C part of Python, however, writes the
number of every signal to the "wakeup" descriptor at once, where a thread reads it. There is one such descriptor: if
another library (asyncio) has set one, it gets the numbers that the thread reads.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from gossamer.comm import Deadline
from gossamer.errors import InputError

ASKED, CLOSED = 255, 0  # what the thread reads beside the numbers of signals
PART = 0.5  # of the grace period in which the training loop may finish its step and close the handle


class Departure:
    """Sets `asked` when the process gets one of `signals`, and calls `leave` in time if the training loop does not.

    Args:
        leave: Tells the others that this worker leaves; called on a thread of its own, at half of the grace period.
        signals: The signals.
        grace: Seconds between the signal and the end of the process.
    """

    def __init__(self, leave: Callable[[], None], signals: Sequence[int], grace: float):
        if threading.current_thread() is not threading.main_thread():
            raise InputError("leave_on() sets signal handlers, which only the main thread can; call it there")
        self.asked = False
        self._leave, self._grace, self._process = leave, grace, os.getpid()
        self._signals = set(signals)
        self._deadline: Deadline | None = None  # the end of the process
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()  # of `_timer` and `_closed`; a signal handler must not take it
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._others_bell = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)  # -1: there is none
        self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}
        self._thread = threading.Thread(target=self._listen, name="gossamer-signals", daemon=True)
        self._thread.start()
        _departures.add(self)

    @property
    def remaining(self) -> float | None:
        """Seconds that are left of the grace period; None as long as no signal has arrived."""
        return None if self._deadline is None else self._deadline.remaining

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, forked after the handler was set: it belongs to no job
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.asked = True
        with suppress(OSError):  # for the thread, in case another library has set the wakeup descriptor since
            self._bell.send(bytes([ASKED]))

    def _listen(self) -> None:
        """Read the numbers of signals: see Note [Why a thread hears the signals]."""
        with self._ear:
            while (numbers := self._ear.recv(64)) and CLOSED not in numbers:
                if self._signals.intersection(numbers) or ASKED in numbers:
                    self._ask()
                if self._others_bell >= 0:
                    with suppress(OSError):
                        os.write(self._others_bell, bytes(n for n in numbers if n != ASKED))

    def _ask(self) -> None:
        with self._lock:
            if self._timer is None and not self._closed:
                self._deadline, self.asked = Deadline(self._grace), True
                self._timer = threading.Timer(PART * self._grace, self._leave)
                self._timer.daemon = True
                self._timer.start()

    def forget_in_child(self) -> None:
        """In a child that was forked: do not tell the parent's thread of the child's signals."""
        self._restore_wakeup()

    def _restore_wakeup(self) -> None:
        current = signal.set_wakeup_fd(-1)
        ours = current == self._bell.fileno()  # another library may have set one since
        with suppress(OSError, ValueError):  # its descriptor may be closed
            signal.set_wakeup_fd(self._others_bell if ours else current)

    def close(self) -> None:
        """Restore the handlers from before, in the main thread. In another one, signals have no effect any more."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
        if threading.current_thread() is threading.main_thread() and self in _departures:
            _departures.discard(self)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._restore_wakeup()
            with suppress(OSError):
                self._bell.send(bytes([CLOSED]))
            self._thread.join(timeout=1.0)
            self._bell.close()


_departures: weakref.WeakSet[Departure] = weakref.WeakSet()


def _forget_in_child() -> None:
    for departure in list(_departures):
        departure.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
