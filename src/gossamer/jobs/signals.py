"""Ctrl-C and SIGTERM: the first asks a job to stop and save, the second ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from gossamer.recipes.graceful_stop import StopHere

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The user has interrupted a job; the message says how to resume it."""


@contextmanager
def interrupts(ask: Callable[[], None], signals: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Call `ask` on the first Ctrl-C or SIGTERM; the second one raises KeyboardInterrupt."""

    def handler(number: int, frame: FrameType | None) -> None:
        ask()
        for s in signals:
            signal.signal(s, signal.default_int_handler)
        text = "stopping after this step with a checkpoint; press Ctrl-C again to quit immediately without saving"
        print(f"\n{text}", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = [signal.signal(s, handler) for s in signals]
    try:
        yield
    finally:
        for s, old in zip(signals, before, strict=True):
            signal.signal(s, old)


@contextmanager
def stop_when_asked() -> Iterator[StopHere]:
    """Yield the stop of virtual workers in this process; Ctrl-C sets it."""
    stop = StopHere()

    def ask() -> None:
        stop.asked = True

    with interrupts(ask):
        yield stop
