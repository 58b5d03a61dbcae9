"""A lane: one optimizer's exchanges, driven by the optimizer's own step hooks.

The hooks, waiting for exchanges and exact averages are common to all algorithms. What happens before and after a step
is up to the subclass: `synchronous.py` (rounds), `asynchronous/` (events), `elastic/` (rounds of changing members).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.comm import (
    ChannelId,
    ExchangeSteps,
    Job,
    PeerWait,
    Purpose,
    Scratch,
    Transport,
    Wire,
    clock,
    exchange,
    room_for,
    widest_float,
    wire_named,
)
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.flat import Bucket, Flat
from gossamer.engine.metrics import Metrics
from gossamer.engine.policies import Settings
from gossamer.engine.signal import SignalMeter
from gossamer.engine.sketch import Sketcher
from gossamer.errors import GossamerError
from gossamer.topology import Layout
from gossamer.topology.plan import Program
from gossamer.topology.schedule import Schedule
from gossamer.trace import TraceWriter

STALLED_AFTER = 0.2  # seconds of waiting before workers parked in a collective call are asked to go on


@dataclass(frozen=True, kw_only=True)
class LaneParts:
    """What a lane is made of."""

    index: int
    rank: int
    optimizer: Optimizer
    flats: list[Flat]
    buckets: list[Bucket]
    schedule: Schedule
    settings: Settings
    layout: Layout  # of all workers, also where the schedule is over nodes
    transport: Transport
    coordinator: Coordinator
    writer: TraceWriter | None
    siblings: Sequence[Lane]  # all lanes of this worker, this one included
    common: bool  # all workers start from the same parameters
    shard: tuple[int, int]  # (i, m): this worker holds shard i of m of its node's replica; (0, 1): all of it
    beside: bool = False  # workers that do not gossip with this one may hold other parts of the same replica


class Lane:
    """One optimizer's exchanges: `mix` runs before `optimizer.step()` and `stepped` after it, once per step."""

    sketcher: Sketcher | None = None  # measures the consensus distance online, where a guard asks for it
    meter: SignalMeter | None = None  # measures the share of the signal, where the optimizer uses it

    def __init__(self, parts: LaneParts):
        self.index, self.rank, self.optimizer = parts.index, parts.rank, parts.optimizer
        self.flats, self.buckets, self.schedule, self.settings = (
            parts.flats,
            parts.buckets,
            parts.schedule,
            parts.settings,
        )
        self.coordinator, self.siblings = parts.coordinator, parts.siblings
        self.wire = wire_named(parts.settings.wire)
        self.metrics = Metrics(parts.rank, parts.layout, parts.writer)
        in_flight = min(parts.settings.exchange.in_flight, len(parts.buckets) + 1)
        self.channel = parts.transport.channel(
            ChannelId(parts.index, Purpose.PARAMETERS), in_flight, parts.settings.timeout
        )
        self.k = 0  # rounds launched
        self.keeps_alive: list[object] = []  # the optimizer's hooks hold the lane, which holds its handle
        self.checks: list[Callable[[], None]] = []  # called before a step, when the gradients are there
        self.overwritten = False  # the user loaded other parameters: what is in flight belongs to the old ones
        self.averaged = 0  # how many averaged() blocks the user is in
        self._stalled = False  # the last wait took so long that parked workers were asked to go on
        self.alone = self.schedule.topology.n == 1
        layout = self.schedule.topology.layout if self.schedule.inside is None else self.schedule.inside
        self._largest_part = max(layout.per_node)
        self._out = [] if self.alone else [self.room(b.x) for b in self.buckets]
        self._group_sizes = [len(g["params"]) for g in self.optimizer.param_groups]
        self._frozen = [p for g in self.optimizer.param_groups for p in g["params"] if not p.requires_grad]
        self._start = self.norms()
        self._unseen = False  # the parameters have changed without a step
        self._outer: FrameType | None = None  # the step() call under way
        self._ready = False  # the parameters are mixed, step() may go on
        self._mark = clock()  # when the training thread began what it does now
        self._forwarded = False  # the model's forward pass was seen, so the time since `_mark` is the backward pass
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    # -- hooks ------------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if self._outer is not None and _on_stack(self._outer, caller):
            return None  # a subclass calls super().step(): one step, not two
        if self.averaged:
            raise GossamerError(
                "optimizer.step() inside `with gossip.averaged()`: the parameters are restored at the end of the "
                "block, so the step would be lost; leave the block before training"
            )
        self._outer, self._ready = caller, False
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check_and_mix()
            return None

        def closure_then_mix() -> Any:
            loss = closure()  # forward and backward at the un-mixed point
            if not self._ready:
                self._check_and_mix()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_mix}
        return (args[0], closure_then_mix, *args[2:]), kwargs

    def _check_and_mix(self) -> None:
        for check in self.checks:
            check()
        self.mix()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = sys._getframe(1)
        if self._outer is not None and caller is not self._outer and _on_stack(self._outer, caller):
            return
        self._outer = None
        if not self._ready:  # it moved parameters that were not mixed, perhaps while they were being sent
            raise GossamerError(
                f"{type(optimizer).__name__}.step() was given a closure and did not call it, so its step cannot be "
                "combined with the neighbors'; evaluate the closure yourself and call step() without it"
            )
        now = clock()
        self.metrics.span("step", self._mark, now, step=self.metrics.steps)
        self.metrics.stepped()
        self.stepped()
        self._mark = clock()

    def forwarded(self, since: float) -> None:
        """Record that the model's forward pass ran from `since` until now. Only called when a trace is written."""
        now = clock()
        self.metrics.span("forward", since, now, step=self.metrics.steps)
        self._mark, self._forwarded = now, True

    def _computed(self) -> None:
        """The step begins: record the time of forward and backward, and check the parameters' storage."""
        self.metrics.span("backward" if self._forwarded else "compute", self._mark, clock(), step=self.metrics.steps)
        self._forwarded = False
        self._check()

    def norms(self) -> list[float]:
        """The norm of each bucket of this worker's parameters."""
        return [float(torch.linalg.vector_norm(b.x.detach(), dtype=widest_float(b.x))) for b in self.buckets]

    def trained_unseen(self) -> bool:
        """Whether the parameters changed without a step of the optimizer, and without a `load_state_dict()`. Once."""
        seen = self.metrics.steps or self.overwritten or self.averaged or self.k
        if seen or self._unseen or self.norms() == self._start:
            return False
        self._unseen = True
        return True

    # -- what each algorithm does -----------------------------------------------------------------------------

    def mix(self) -> None:
        """Before the step: mix the neighbors' values into the parameters, and set `_ready`."""
        raise NotImplementedError

    def stepped(self) -> None:
        """After the step: send the new values to the neighbors."""
        raise NotImplementedError

    def settle(self) -> None:
        """In a collective call: wait until nothing is in flight."""

    def drop(self) -> None:
        """Discard what is in flight."""

    def adopt(self) -> None:
        """Continue from the parameters as they are: the user has written them."""

    def restart(self) -> None:
        """In a collective call: continue from the parameters as they are, on all workers."""
        self.adopt()

    def mix_only(self) -> None:
        """Take part in a round without a step, so that workers that need this one can continue."""
        raise NotImplementedError

    def serve(self) -> bool:
        """Like `mix_only`, but only if it need not wait; return whether it was done."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        raise NotImplementedError

    def count_steps(self, steps: int) -> None:
        """In a collective call: this worker has taken `steps` steps."""
        self.metrics.steps = steps

    def values(self) -> list[Tensor]:
        """This worker's parameters, one tensor per bucket."""
        return [b.x for b in self.buckets]

    def total_steps(self) -> int:
        """Steps of all workers together: synchronous workers take equally many."""
        return self.metrics.steps * self.metrics.layout.n

    def park(self) -> None:
        """This worker enters a collective call."""

    def resume(self) -> None:
        """This worker leaves a collective call."""

    def average(self, inputs: list[Tensor], outs: list[Tensor], wire: Wire) -> list[Job]:
        """Launch exact global averages of `inputs` (one per bucket) into `outs`. Collective."""
        jobs = []
        for b, (value, out) in enumerate(zip(inputs, outs, strict=True)):
            program = self.schedule.program(self.k, b, self.rank, value.numel(), average=True)
            if not program:
                out[: value.numel()].copy_(value)
                continue
            jobs.append(self._launch_job(self.k, b, program, partial(exchange, program, value, out, wire, lazy=False)))
        return jobs

    def _launch_job(self, k: int, bucket: int, program: Program, make: Callable[[Scratch], ExchangeSteps]) -> Job:
        """Launch an exchange."""
        job = Job(k, bucket, make, turn=self.turn(bucket))
        self.channel.launch(job)
        return job

    def turn(self, bucket: int) -> int:
        """The turn of a bucket's exchanges: consecutive for the buckets that are exchanged in the same round."""
        return bucket // self.schedule.fragments

    def room(self, x: Tensor) -> Tensor:
        """A receive buffer for a bucket like `x`."""
        return torch.empty(room_for(x.numel(), self._largest_part), dtype=x.dtype, device=x.device)

    def close(self, drain: float) -> None:
        with ExitStack() as ends:  # runs all callbacks even if Ctrl-C interrupts one
            if self.sketcher is not None:
                ends.callback(self.sketcher.close)
            if self.meter is not None:
                ends.callback(self.meter.close)
            ends.callback(self.channel.close, drain)
            for hook in self._hooks:
                ends.callback(hook.remove)

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        """Wait until `job` is done. `assisting`: let the worker's other lanes serve other workers meanwhile."""
        if not job.done:
            wait = PeerWait(self.rank, self.settings.timeout)
            # Ask sooner if the previous wait stalled as well: workers without data are parked by now.
            pause = STALLED_AFTER / 20 if self._stalled else STALLED_AFTER
            self._stalled = False
            while not self.channel.wait(job, pause):
                self._stalled, pause = True, STALLED_AFTER
                self.coordinator.stalled(self, self.k, assist=assisting)
                stuck = self.channel.stuck(job)
                if stuck is not None:
                    raise stuck
                wait.check(partial(_awaited, job), "is that worker alive, and does it train as many steps?")
            self.metrics.waited_for(job, wait.since, clock())
        if job.error is not None:
            raise job.error

    def _check(self) -> None:
        for flat in self.flats:
            flat.check()
        if any(p.requires_grad for p in self._frozen):
            raise GossamerError(
                "a parameter that was frozen at decentralize() has been unfrozen, and would train on every worker by "
                "itself; close() and call decentralize() again after unfreezing"
            )
        sizes = [len(g["params"]) for g in self.optimizer.param_groups]
        if sizes != self._group_sizes:
            raise GossamerError(
                f"the optimizer's parameter groups changed from {self._group_sizes} to {sizes} parameters after "
                "decentralize(); add all groups first, or close() and call decentralize() again"
            )


def _awaited(job: Job) -> str:
    peer = "its own queue" if job.blocked_on is None else f"worker {job.blocked_on}"
    return f"{peer} (round {job.round}, bucket {job.bucket})"


def _on_stack(frame: FrameType, top: FrameType | None) -> bool:
    """Whether `frame` is `top` or one of its callers. A step() that raised is not: its frame is gone."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False
