"""A worker's state for another one: at the start (all begin from the same values) and when one joins a running job.

The state is a `torch.save` of plain values and tensors, read with `weights_only=True`: bytes from the network never
run code. The training thread only clones; what is slow is done on a thread of its own.
"""

from __future__ import annotations

import io
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gossamer.comm import Membership, PeerError, Refused, send_state
from gossamer.errors import GossamerError

PATIENCE = 30.0  # seconds for a donor to come to the end of its step and to send


class StateTransfer:
    """Serves this worker's state to others, and fetches theirs."""

    def __init__(self, members: Membership):
        self.members = members
        self._founding: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # a copy for everyone below in the tree
        self._waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        members.serve = self._serve

    def of(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Whose state it is."""
        self.model, self.optimizers = model, optimizers

    def found(self, ranks: tuple[int, ...]) -> None:
        """Everybody starts from the first worker's parameters and buffers, handed down a binary tree."""
        at = ranks.index(self.members.rank)
        if at > 0:
            above = self.members.record.members[ranks[(at - 1) // 2]]
            data = self.members.links.fetch((above.host, above.port), {"founding": True}, self.members.timeout)
            self._load(data, moments=False)
        else:
            data = _saved({"model": self.model.state_dict()})
        below = sum(child < len(ranks) for child in (2 * at + 1, 2 * at + 2))
        for _ in range(below):
            self._founding.put(data)

    def fetch(self) -> dict[str, Any]:
        """Load a member's parameters, buffers and optimizer state; what it says of its progress."""
        failures = []
        for donor in self.members.donors():
            try:
                data = self.members.links.fetch((donor.host, donor.port), {}, PATIENCE)
            except (OSError, Refused) as error:
                failures.append(f"{donor.host}:{donor.port} ({error})")
                continue
            return self._load(data, moments=True)
        asked = ", ".join(failures) or "there is none"
        raise PeerError(f"no member of the running job handed over its state: {asked}; is the job still alive?")

    def between_steps(self, progress: Callable[[], dict[str, Any]]) -> None:
        """On the training thread, at the end of a step: a copy for whoever asked."""
        asked = []
        with suppress(queue.Empty):
            while True:
                asked.append(self._waiting.get_nowait())
        if not asked:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": progress(),
        }
        copy = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), state)
        threading.Thread(target=self._send, args=(asked, copy), name="gossamer-handover", daemon=True).start()

    def close(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().close()

    def _serve(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        if not hello.get("founding"):
            self._waiting.put(connection)
            return
        with connection, suppress(queue.Empty, OSError):
            send_state(connection, self.members.run, self._founding.get(timeout=self.members.timeout))

    def _send(self, asked: list[socket.socket], state: dict[str, Any]) -> None:
        data = _saved(state)
        for connection in asked:
            with connection, suppress(OSError):
                connection.settimeout(PATIENCE)
                send_state(connection, self.members.run, data)

    def _load(self, data: bytes, *, moments: bool) -> dict[str, Any]:
        try:
            state = torch.load(io.BytesIO(data), weights_only=True)
            self.model.load_state_dict(state["model"])
            if moments:
                for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
            progress: dict[str, Any] = state.get("progress", {})
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise GossamerError(f"the state that a member handed over does not fit this model: {error}") from error
        return progress


def _saved(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
