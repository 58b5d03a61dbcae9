"""Synchronous gossip: rounds in step with the optimizer, communicated while adapting or after it.

Communicate while adapting (awc): x(t+1) = d(grad f(x(t))) + sum_j w_ij(t) x_j(t).
    before step()   wait for the exchange launched one step ago, put the mixed values into the parameters
    step()          the user's optimizer applies the gradient that was taken at the un-mixed point
    after step()    launch the exchange of the new values; it runs during the whole next forward and backward
Adapt then combine (atc): after step() launch, wait, mix; no overlap.

With an outer step (outer.py) the exchange of awc has the next `every` steps, and its result is a correction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import ExchangeSteps, Job, Mixed, Plain, Scratch, arrived, clock, correction, exchange, inspected
from gossamer.engine.anchors import Anchors
from gossamer.engine.lane import Lane, LaneParts
from gossamer.engine.outer_step import OuterStep, check_state
from gossamer.engine.policies import ATC, AWC, Synchronous
from gossamer.engine.signal import SignalMeter
from gossamer.engine.sketch import Sketcher
from gossamer.errors import InputError
from gossamer.topology.plan import Program


class SyncLane(Lane):
    """One round in flight at a time: idle (`jobs` is None) -> launched -> arrived -> applied."""

    def __init__(self, parts: LaneParts):
        super().__init__(parts)
        policy = self.settings.algorithm
        assert isinstance(policy, Synchronous)
        self.every, self.staleness = policy.every, policy.staleness if isinstance(policy, AWC) else 0
        self.combines = isinstance(policy, ATC)
        self.jobs: list[Job] | None = None  # the round in flight: one job per bucket that exchanges something
        self.forced = False  # the round in flight is an exact average that the guard asked for
        self.skips = 0  # steps taken without mixing since the round in flight was launched
        # With staleness the parameters move while an exchange of their older values is in flight.
        stale = self.staleness and not self.alone
        self.sketcher = None if self.alone else Sketcher.of(parts, self._wait_beside)
        # An average of all members would wait for the dead ones of an elastic job.
        static = not self.alone and parts.settings.elastic is None
        self.meter = SignalMeter.of(parts, self._wait_beside) if static else None
        self._outer_step = None if policy.outer is None else OuterStep(policy.outer, self.buckets)
        anchored = self.wire.anchored and not self.alone
        self._anchors = Anchors(self.buckets, parts.common) if anchored else None
        self._spans_steps = self._outer_step is not None and not self.combines
        self._sent = [torch.zeros_like(b.x) for b in self.buckets] if stale or self._spans_steps else None

    @torch.no_grad()
    def mix(self) -> None:
        """Wait for the round in flight and apply it (or, with staleness, step once more without it)."""
        self._computed()
        self._ready = True
        early = self._spans_steps and (self.metrics.steps + 1) % self.every != 0
        if self.jobs is not None and not early:
            late = self.skips < self.staleness and not all(self.channel.wait(j, 0) for j in self.jobs)
            if late:
                self.skips += 1
                self.metrics.skipped += 1
            else:
                self.finish(assisting=True)
                self.apply()
        self._mark = clock()

    def stepped(self) -> None:
        if self.jobs is None and self.metrics.steps % self.every == 0:
            if self.meter is not None:
                self.meter.look(self.k)
            self.launch()

    @torch.no_grad()
    def launch(self, *, combine: bool = True) -> None:
        """Send the parameters as they are now: round k."""
        if self.alone and self._outer_step is None:
            self.k += 1
            self.metrics.rounds += 1
            return
        for flat in self.flats:
            flat.pack()
        self.forced = self.sketcher is not None and self.sketcher.at_launch(self.k, self.buckets)
        if self.meter is not None:
            self.meter.at_launch(self.k)
        self.metrics.guard_averages += self.forced
        if self._anchors is not None and self._anchors.wanted:
            self.forced, self._anchors.wanted = True, False
        self.metrics.averages += self.forced or self.schedule.completes_average(self.k)
        self.skips = 0
        if self._outer_step is not None:
            acts = self._outer_step.policy.acts(self.schedule.averages(self.k))
            exchanged = (b for b in range(len(self.buckets)) if self.schedule.exchanges(self.k, b))
            self._outer_step.acting = frozenset(exchanged if acts else ())
        self._post()
        self.k += 1
        self.metrics.rounds += 1
        if combine and self.combines:
            self.coordinator.combine(self)

    def _post(self) -> None:
        """Launch the exchanges of round k: the topology's, or an exact average where one is due or forced."""
        self.jobs = []
        # An exact average in a lossy format would leave the rounding as distance, whatever the guard asks for.
        exact = self.forced or self.schedule.averages(self.k)
        corrects = self._sent is not None or self._outer_step is not None
        for b, bucket in enumerate(self.buckets):
            source = bucket.x
            if self._sent is not None and (self.forced or self.schedule.exchanges(self.k, b)):
                source = self._sent[b]
                source.copy_(bucket.x)
            program = self.schedule.program(self.k, b, self.rank, bucket.x.numel(), average=self.forced)
            if program:
                make = self._exchange(program, b, source, exact=exact, difference=corrects)
                if self.settings.max_jump is not None:
                    make = partial(inspected, make, source, self.settings.max_jump, self.metrics.refuse, corrects)
                self.jobs.append(self._launch_job(self.k, b, program, make))

    def _exchange(
        self, program: Program, b: int, source: Tensor, *, exact: bool, difference: bool
    ) -> Callable[[Scratch], ExchangeSteps]:
        """The exchange of bucket b. `difference`: its result is added to the parameters, which move meanwhile."""
        out = self._out[b]
        if exact and self._anchors is not None:
            return partial(self._anchors.average, program, b, source, out, self.average_id(), difference)
        wire, anchor = Plain() if exact else self.wire, None if self._anchors is None else self._anchors.of(b)
        return partial(correction if difference else exchange, program, source, out, wire, anchor=anchor)

    def average_id(self) -> int:
        """A number for the exact average of round k, the same on all workers that take part in it, and not 0."""
        return self.k + 1

    def finish(self, *, assisting: bool = False) -> None:
        """Wait until the round in flight has arrived, without applying it."""
        for job in self.jobs or ():
            self.wait(job, assisting=assisting)

    def _wait_beside(self, job: Job) -> None:
        """Wait for a side average, and count what it sent."""
        self.wait(job)
        self.metrics.beside(job)

    @torch.no_grad()
    def apply(self) -> None:
        """Write the round that arrived into the parameters, unless the user has loaded others since."""
        if self.overwritten:
            self.adopt()
        if self.jobs is None:
            return
        if self._sent is not None:
            for flat in self.flats:
                flat.pack()
        for job in self.jobs:
            self.metrics.exchanged(job)
            if job.result is None or self._outer_step is not None:
                continue
            x = self.buckets[job.bucket].x
            if self._sent is None:
                job.result.write_to(x)
            else:
                job.result.add_to(x)
        if self._outer_step is not None:
            results = {job.bucket: job.result for job in self.jobs}
            for b, bucket in enumerate(self.buckets):
                self._outer_step.apply(b, bucket.x if self._sent is None else self._sent[b], results.get(b))
        self.jobs = None
        for flat in self.flats:
            flat.unpack()

    # -- for collective calls ---------------------------------------------------------------------------------

    def mix_only(self) -> None:
        """Take part in a round without a step, so that workers that need this one can continue."""
        self.finish()
        self.apply()
        self.launch()
        self.metrics.mix_only += 1

    def serve(self) -> bool:
        """Like `mix_only`, but only if it need not wait; return whether it was done."""
        if not all(self.channel.wait(job, 0) for job in self.jobs or ()):
            return False
        self.finish()  # raises the errors of the jobs
        self.apply()
        self.launch(combine=False)
        self.metrics.mix_only += 1
        return True

    def settle(self) -> None:
        """Wait for the round in flight; adapt-then-combine leaves none behind."""
        self.finish()
        if self.combines:
            self.apply()

    def adopt(self) -> None:
        """Continue from the parameters as they are: the user has written them."""
        self.drop()
        if self._outer_step is not None:
            for flat in self.flats:
                flat.pack()
            self._outer_step.restart()

    def restart(self) -> None:
        super().restart()
        if self._anchors is not None:
            self._anchors.wanted = True

    def drop(self) -> None:
        """Discard the round in flight after it has arrived."""
        self.finish()
        for job in self.jobs or ():
            self.metrics.exchanged(job)
        self.jobs, self.skips, self.overwritten = None, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what arrived of the round in flight. It is not sent again: a neighbor that took another number
        of steps may have applied it already."""
        if self.overwritten:
            self.adopt()
        state: dict[str, Any] = {
            "round": self.k,
            "steps": self.metrics.steps,
            "skips": self.skips,
            "forced": self.forced,
            "stale": self._sent is not None,
            "sketch": self.sketcher.state_dict() if self.sketcher is not None else None,
            "signal": self.meter.state_dict() if self.meter is not None else None,
        }
        if self._outer_step is not None:
            state["outer"] = self._outer_step.state_dict()
        if self._anchors is not None:
            self.finish()  # an average in flight makes new anchors
            state["anchors"] = self._anchors.state_dict()
        if self.jobs is not None:
            self.finish()
            if self._spans_steps and self._sent is not None:
                state["sent"] = [s.clone() for s in self._sent]
            state["arrived"] = [
                (j.bucket, None if j.result is None else j.result.out.clone(), j.result and j.result.weight, j.sent)
                for j in self.jobs
            ]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with what had arrived of the round in flight."""
        if "stale" not in state:
            raise InputError(
                "the state was saved by Gossamer 0.1, which did not save the round in flight; load only the model and "
                "the optimizer"
            )
        check_state(self._outer_step, state, combines=self.combines)
        if self._anchors is not None:
            self._anchors.check_state(state.get("anchors"))
        if "arrived" in state and not self.alone and state["stale"] != (self._sent is not None):
            raise InputError(
                f"the state was saved {'with' if state['stale'] else 'without'} staleness and this run has "
                f"staleness={self.staleness}; resume with the same, or load only the model and the optimizer"
            )
        self.drop()
        self.k, self.metrics.steps, self.forced = state["round"], state["steps"], state["forced"]
        self.metrics.rounds = self.k
        if self.sketcher is not None and state["sketch"] is not None:
            self.sketcher.load_state_dict(state["sketch"])
        if self.meter is not None and state.get("signal") is not None:
            self.meter.load_state_dict(state["signal"])
        if self._outer_step is not None:
            self._outer_step.load_state_dict(state["outer"])
        if self._anchors is not None:
            self._anchors.load_state_dict(state.get("anchors"))
        if "arrived" not in state or (self.alone and self._outer_step is None):
            return
        for flat in self.flats:
            flat.pack()  # what arrived is mixed with the loaded values
        for sent, saved in zip(self._sent or (), state.get("sent", ()), strict=False):
            sent.copy_(saved)
        self.jobs = []
        for b, out, weight, sent in state["arrived"]:
            mixed = None
            if out is not None:
                self._out[b][: out.numel()].copy_(out)
                mixed = Mixed(self._out[b][: out.numel()], weight)
            self.jobs.append(Job(self.k - 1, b, arrived, result=mixed, finished=clock(), sent=dict(sent)))
        self.skips = state["skips"]
