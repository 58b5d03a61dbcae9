"""A worker that is asked to leave by a signal: spot machines, Kubernetes and Slurm send SIGTERM and kill later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from gossamer.errors import InputError

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
        self._timer: threading.Timer | None = None
        self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child, forked after the handler was set: it belongs to no job
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not self.asked:
            self.asked = True
            self._timer = threading.Timer(PART * self._grace, self._leave)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Restore the handlers from before."""
        if self._timer is not None:
            self._timer.cancel()
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)
