"""Measure the links of the lab by a transfer over a plain socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gossamer.lab.namespaces import enter_namespace
from gossamer.lab.shaping import address, burst

T = TypeVar("T")
Way = tuple[int, int]  # from one node to another
AT_ONCE = 2e9  # bits per second that can be measured at the same time; Python cannot receive more
FRAME = 1514 / 1448  # bytes on the wire per byte of payload: Ethernet, IP and TCP headers at an MTU of 1500


def measure(names: list[str], a: int, b: int, rate: float, seconds: float = 0.25) -> float:
    """The rate from node a to node b in bits per second, with headers, as the shaper counts."""
    size = int(rate / 8 * seconds)
    skip = 3 * burst(rate) + size // 8  # the bursts of both shapers pass unlimited; only the steady part is measured
    listener = _inside(names[b], lambda: socket.create_server((address(b), 0)))
    with listener:
        port = listener.getsockname()[1]
        sender = _inside(names[a], lambda: socket.create_connection((address(b), port), timeout=10))
        listener.settimeout(10)
        receiver, _ = listener.accept()
    with sender, receiver:
        receiver.settimeout(30)
        thread = threading.Thread(target=_send, args=(sender, size + skip), daemon=True)
        thread.start()
        begin, got = 0.0, 0
        buffer = bytearray(1 << 16)
        first = 0
        while got < size + skip:
            got += receiver.recv_into(buffer) or size + skip
            if not begin and got >= skip:
                begin, first = time.monotonic(), got
        elapsed = time.monotonic() - begin
        thread.join()
    return (got - first) * 8 * FRAME / elapsed


def batches(rates: Mapping[Way, float]) -> list[list[Way]]:
    """Group ways that can be measured at the same time.

    No two ways of a batch share a node, because acknowledgments of one would wait in the queue of the other, and
    together they are no faster than the cores can handle.
    """
    made: list[list[Way]] = []
    for way, rate in rates.items():
        for batch in made:
            alone = not {*way} & {node for other in batch for node in other}
            if alone and rate + sum(rates[other] for other in batch) <= AT_ONCE:
                batch.append(way)
                break
        else:
            made.append([way])
    return made


def _send(sender: socket.socket, size: int) -> None:
    chunk = bytes(1 << 16)
    while size > 0:
        sender.sendall(chunk[: min(size, len(chunk))])
        size -= len(chunk)


def _inside(namespace: str, make: Callable[[], T]) -> T:
    """Call `make` in a namespace, on a thread that enters it. A socket stays in the namespace it was made in."""

    def enter_and_make() -> T:
        enter_namespace(namespace)
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_make).result()
