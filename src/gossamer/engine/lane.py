"""A lane: one optimizer's exchanges, driven by the optimizer's own step hooks.

Communicate while adapting (awc): x(t+1) = d(grad f(x(t))) + sum_j w_ij(t) x_j(t).
    before step()   wait for the exchange launched an iteration ago, put the mixed values into the parameters
    step()          the user's optimizer applies the gradient that was taken at the un-mixed point
    after step()    launch the exchange of the new values; it runs during the whole next forward and backward
Adapt then combine (atc): after step() launch, wait, mix; no overlap.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.comm import Channel, Job, Mixed, PeerError, Wire, arrived, clock, exchange, room_for
from gossamer.engine.flat import Bucket, Flat
from gossamer.engine.meter import Meter
from gossamer.engine.settings import Settings
from gossamer.engine.sketch import Sketcher
from gossamer.errors import GossamerError, GossamerWarning, InputError
from gossamer.topology.schedule import Schedule

WARN_AFTER = 30.0  # seconds of standing still before the user is told whom we wait for
NUDGE_AFTER = 0.2  # seconds of standing still before workers parked in a collective call are asked to go on


class Lane:
    def __init__(
        self,
        index: int,
        rank: int,
        optimizer: Optimizer,
        flats: list[Flat],
        buckets: list[Bucket],
        schedule: Schedule,
        settings: Settings,
        wire: Wire,
        channel: Channel,
        meter: Meter,
        sketcher: Sketcher | None,
        nudge: Callable[[int, int], None],
    ):
        self.index, self.rank, self.optimizer = index, rank, optimizer
        self.flats, self.buckets, self.schedule, self.settings = flats, buckets, schedule, settings
        self.wire, self.channel, self.meter, self.sketcher, self._nudge = wire, channel, meter, sketcher, nudge
        self.k = 0  # rounds launched
        self.jobs: list[Job] | None = None  # the round in flight, one job a bucket that has something to do
        self.forced = False  # the round in flight is an exact average that the guard asked for
        self.skips = 0  # steps taken without mixing since the round in flight was launched
        self.owner: object = None
        self._stood_still = False  # the last wait took so long that parked workers were asked
        self.assist: Callable[[], None] | None = None  # what to do for the other lanes while this one stands still
        self.alone = schedule.topology.n == 1
        largest = max(schedule.topology.layout.per_node)
        if schedule.inside is not None:
            largest = max(schedule.inside.per_node)
        self._largest_part = largest
        self._out = [] if self.alone else [self.room(b.x) for b in buckets]
        # With staleness the parameters move while an exchange of their older values is in flight.
        self._sent = [torch.empty_like(b.x) for b in buckets] if settings.staleness and not self.alone else None
        self._group_sizes = [len(g["params"]) for g in optimizer.param_groups]
        self._frozen = [p for g in optimizer.param_groups for p in g["params"] if not p.requires_grad]
        self._outer: FrameType | None = None  # the step() call under way
        self._ready = False  # the parameters are mixed, step() may go on
        self._mark = clock()  # since when the training thread does what it does now
        self._forwarded = False  # that is the backward pass: a forward pass was seen
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    # -- hooks ------------------------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if self._outer is not None and _on_stack(self._outer, caller):
            return None  # a subclass calls super().step(): one step, not two
        self._outer, self._ready = caller, False
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.mix()
            return None

        def closure_then_mix() -> Any:
            loss = closure()  # forward and backward at the un-mixed point
            if not self._ready:
                self.mix()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_mix}
        return (args[0], closure_then_mix, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = sys._getframe(1)
        if self._outer is not None and caller is not self._outer and _on_stack(self._outer, caller):
            return
        self._outer = None
        if not self._ready:  # an optimizer that never called its closure
            self.mix()
        now = clock()
        self.meter.span("step", self._mark, now, step=self.meter.steps)
        self.meter.steps += 1
        if self.jobs is None and self.meter.steps % self.settings.every == 0:
            self.launch()
        self._mark = clock()

    def forwarded(self, since: float) -> None:
        """The model's forward pass ran from `since` until now (only told when there is a trace to write)."""
        now = clock()
        self.meter.span("forward", since, now, step=self.meter.steps)
        self._mark, self._forwarded = now, True

    # -- the three moves ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def mix(self) -> None:
        """Wait for the round in flight and apply it (or, with staleness, step once more without it)."""
        now = clock()
        self.meter.span("backward" if self._forwarded else "compute", self._mark, now, step=self.meter.steps)
        self._forwarded = False
        self._check()
        self._ready = True
        if self.jobs is not None:
            late = self.skips < self.settings.staleness and not all(self.channel.wait(j, 0) for j in self.jobs)
            if late:
                self.skips += 1
                self.meter.skipped += 1
            else:
                self.finish(assisting=True)
                self.apply()
        self._mark = clock()

    @torch.no_grad()
    def launch(self, *, combine: bool = True) -> None:
        """Send the parameters as they are now: round k."""
        if self.alone:
            self.k += 1
            self.meter.rounds += 1
            return
        for flat in self.flats:
            flat.pack()
        self.forced = self.sketcher is not None and self.sketcher.at_launch(self.k, self.buckets)
        self.meter.guard_averages += self.forced
        self.meter.averages += self.forced or self.schedule.averages(self.k)
        self.skips = 0
        self._post()
        self.k += 1
        self.meter.rounds += 1
        if combine and self.settings.algorithm == "atc":
            self.combine()

    def combine(self) -> None:
        """Adapt-then-combine: mix what was just sent before going on."""
        self.finish(assisting=True)
        self.apply()

    def _post(self) -> None:
        """Launch the exchanges of round k: the topology's, or an exact average if the guard forced one."""
        self.jobs = []
        for b, bucket in enumerate(self.buckets):
            source = bucket.x
            if self._sent is not None:
                source = self._sent[b]
                source.copy_(bucket.x)
            program = self.schedule.program(self.k, b, self.rank, bucket.x.numel(), average=self.forced)
            if program:
                make = partial(exchange, program, source, self._out[b], self.wire)
                job = Job(self.k, b, make)
                self.jobs.append(job)
                self.channel.launch(job)

    def finish(self, *, assisting: bool = False) -> None:
        """Wait until the round in flight has arrived, without applying it."""
        for job in self.jobs or ():
            self.wait(job, assisting=assisting)

    @torch.no_grad()
    def apply(self) -> None:
        """Put the round that arrived into the parameters."""
        if self.jobs is None:
            return
        if self._sent is not None:
            for flat in self.flats:
                flat.pack()
        for job in self.jobs:
            self.meter.exchanged(job)
            if job.result is None:
                continue
            x = self.buckets[job.bucket].x
            if self._sent is None:
                job.result.write_to(x)
            else:
                job.result.correct(x, self._sent[job.bucket])
        self.jobs = None
        for flat in self.flats:
            flat.unpack()

    def values(self) -> list[Tensor]:
        """What counts as this worker's parameters, a tensor a bucket."""
        return [b.x for b in self.buckets]

    def total_steps(self) -> int:
        """Steps of all workers: they keep in step."""
        return self.meter.steps * self.meter.layout.n

    def park(self) -> None:
        """This worker is in a collective call."""

    def resume(self) -> None:
        """The collective call is over."""

    # -- for collective calls ----------------------------------------------------------------------------------

    def mix_only(self) -> None:
        """A round without a step, so that others who need this worker's share can go on."""
        self.finish()
        self.apply()
        self.launch()
        self.meter.mix_only += 1

    def serve(self) -> bool:
        """A mix-only round if nothing has to be waited for; whether there was one."""
        if not all(self.channel.wait(job, 0) for job in self.jobs or ()):
            return False
        self.finish()  # raises what went wrong
        self.apply()
        self.launch(combine=False)
        self.meter.mix_only += 1
        return True

    def settle(self) -> None:
        """Wait for the round in flight; adapt-then-combine leaves none behind."""
        self.finish()
        if self.settings.algorithm == "atc":
            self.apply()

    def average(self, inputs: list[Tensor], outs: list[Tensor], wire: Wire) -> list[Job]:
        """Launch exact global averages of `inputs` (one a bucket) into `outs`. Collective."""
        jobs = []
        for b, (value, out) in enumerate(zip(inputs, outs, strict=True)):
            program = self.schedule.program(self.k, b, self.rank, value.numel(), average=True)
            if not program:
                out[: value.numel()].copy_(value)
                continue
            job = Job(self.k, b, partial(exchange, program, value, out, wire, lazy=False))
            jobs.append(job)
            self.channel.launch(job)
        return jobs

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what cannot be sent again: with staleness the parameters moved on since the launch."""
        state: dict[str, Any] = {
            "round": self.k,
            "steps": self.meter.steps,
            "skips": self.skips,
            "forced": self.forced,
            "in_flight": self.jobs is not None,
            "sketch": self.sketcher.state_dict() if self.sketcher is not None else None,
        }
        if self.jobs is not None and self._sent is not None:
            self.finish()
            state["arrived"] = [
                (j.bucket, j.result.out.clone(), j.result.weight, self._sent[j.bucket].clone())
                for j in self.jobs
                if j.result is not None
            ]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. The round in flight is sent again from the same parameters."""
        if state["in_flight"] and not self.alone and ("arrived" in state) != (self._sent is not None):
            raise InputError(
                f"the state was saved {'with' if 'arrived' in state else 'without'} staleness and this run has "
                f"staleness={self.settings.staleness}; resume with the same, or load only the model and the optimizer"
            )
        self.drop()
        self.k, self.meter.steps, self.forced = state["round"], state["steps"], state["forced"]
        if self.sketcher is not None and state["sketch"] is not None:
            self.sketcher.load_state_dict(state["sketch"])
        if not state["in_flight"] or self.alone:
            return
        if self._sent is None:
            for flat in self.flats:
                flat.pack()
            self.k -= 1
            self._post()
            self.k += 1
        else:
            self.jobs = []
            for b, out, weight, sent in state["arrived"]:
                self._out[b][: out.numel()].copy_(out)
                self._sent[b].copy_(sent)
                mixed = Mixed(self._out[b][: out.numel()], weight)
                self.jobs.append(Job(self.k - 1, b, arrived, result=mixed, finished=clock()))
        self.skips = state["skips"]

    def room(self, x: Tensor) -> Tensor:
        """A receive buffer for a bucket like `x`."""
        return torch.empty(room_for(x.numel(), self._largest_part), dtype=x.dtype, device=x.device)

    def adopt(self) -> None:
        """The parameters were written by the user: go on from them."""
        self.drop()

    def drop(self) -> None:
        """Forget the round in flight (after it arrived)."""
        self.finish()
        for job in self.jobs or ():
            self.meter.exchanged(job)
        self.jobs, self.skips = None, 0

    def close(self, drain: float) -> None:
        for hook in self._hooks:
            hook.remove()
        self.channel.close(drain)
        if self.sketcher is not None:
            self.sketcher.close()

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, job: Job, *, assisting: bool = False) -> None:
        if not job.done:
            since = clock()
            warned = False
            # Whoever stood still in its last wait too asks sooner: those at the end of their data are parked by now.
            patience = NUDGE_AFTER / 20 if self._stood_still else NUDGE_AFTER
            self._stood_still = False
            while not self.channel.wait(job, patience):
                self._stood_still, patience = True, NUDGE_AFTER
                waited = clock() - since
                self._nudge(self.index, self.k)
                if assisting and self.assist is not None:
                    self.assist()
                stuck = self.channel.stuck(job)
                if stuck is not None:
                    raise stuck
                whom = "its own queue" if job.blocked_on is None else f"worker {job.blocked_on}"
                if waited > WARN_AFTER and not warned:
                    warned = True
                    warnings.warn(
                        f"worker {self.rank} has waited {waited:.0f} s for {whom} (round {job.round}, bucket "
                        f"{job.bucket}); it gives up after timeout={self.settings.timeout:g} s",
                        GossamerWarning,
                        stacklevel=2,
                    )
                if waited > self.settings.timeout:
                    raise PeerError(
                        f"worker {self.rank} waited {waited:.0f} s for {whom} (round {job.round}, bucket "
                        f"{job.bucket}) and gives up; is that worker alive, and does it train as many steps? Raise "
                        "timeout= if its step really takes that long"
                    )
            self.meter.waited_for(job, since, clock())
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


def _on_stack(frame: FrameType, top: FrameType | None) -> bool:
    """Whether `frame` is `top` or below it: a step() that raised is not, its hooks are simply over."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False
