"""The anchors of a lane: what its parameters are sent relative to. See Note [Anchors] in comm/quantized.py.

A lane with a quantized wire keeps one more copy of its parameters: the result of the last exact average of each bucket,
which is the same on all workers. At the start it is the common starting point. Without one (`broadcast=False`), and
after `reset()`, which may have changed the parameters by much, the next round is an exact average.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gossamer.comm import Anchor, ExchangeSteps, Plain, Scratch, exchange, finite
from gossamer.engine.flat import Bucket
from gossamer.errors import InputError
from gossamer.topology.plan import Program


class Anchors:
    """The anchor of each bucket, and the id of the exact average that made it.

    Args:
        buckets: The buckets of the lane, with the values from which the worker starts.
        common: Whether all workers start from the same values.
    """

    def __init__(self, buckets: Sequence[Bucket], common: bool):
        self._values = [b.x.clone() for b in buckets]
        self._ids: list[int | None] = [0 if common else None] * len(buckets)
        self._lock = threading.Lock()  # communication threads write what the training thread copies
        self.wanted = not common  # the next round must be an exact average, on all workers

    def of(self, bucket: int) -> Anchor:
        return Anchor(self._values[bucket], self._ids[bucket])

    def average(
        self, program: Program, bucket: int, x: Tensor, out: Tensor, id: int, difference: bool, scratch: Scratch
    ) -> ExchangeSteps:
        """An exact average of `x`, which becomes the bucket's anchor. `difference`: the result is mean - x.

        A mean that is not finite is not finite on any worker, and all keep the anchor that they have.
        """
        mixed = yield from exchange(program, x, out, Plain(), scratch, lazy=False)
        assert mixed is not None
        if finite(mixed.out):
            with self._lock:
                self._values[bucket].copy_(mixed.out)
                self._ids[bucket] = id
        if difference:
            mixed.out.sub_(x)
        return mixed

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"values": [v.clone() for v in self._values], "ids": list(self._ids), "wanted": self.wanted}

    def check_state(self, state: dict[str, Any] | None) -> None:
        """Refuse anchors of other buckets."""
        ours, theirs = [v.numel() for v in self._values], [v.numel() for v in state["values"]] if state else None
        if theirs is not None and ours != theirs:
            raise InputError(
                f"the state has anchors for buckets of {theirs} elements and this run has buckets of {ours}; resume "
                "with the same exchange= and fragments, or load only the model and the optimizer"
            )

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with saved anchors. None, from a run without anchors: the next round is an exact average."""
        if state is None:
            self.wanted = True
            return
        self.check_state(state)
        with self._lock:
            for mine, saved in zip(self._values, state["values"], strict=True):
                mine.copy_(saved)
            self._ids, self.wanted = list(state["ids"]), state["wanted"]
