"""The handle that `decentralize` returns."""

from __future__ import annotations

import atexit
import math
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm import ChannelId, Job, Purpose, Transport
from gossamer.engine.averages import Control, distance, hold_mean, keep_mean
from gossamer.engine.clipping import GradientClipper
from gossamer.engine.coordinator import Coordinator
from gossamer.engine.lane import Lane
from gossamer.engine.module_hooks import watch_forward, watch_loads
from gossamer.engine.node_gradients import NodeGradients
from gossamer.engine.policies import ATC
from gossamer.engine.prepared import Prepared
from gossamer.engine.protocol import (
    KnowsLocalParameters,
    MixedParameters,
    Participation,
    ScalesWithReplicas,
    UsesSignal,
)
from gossamer.engine.saved_state import Identity
from gossamer.engine.totals import numbers, summed
from gossamer.errors import GossamerError, GossamerWarning, InputError
from gossamer.trace import TraceWriter

EQUAL = 1e-6  # distance of equal parameters to their mean, relative to their norm: the rounding of the mean
Collective = Generator[list[Job], None, Any]  # yields the exchanges it waits for


class Gossip:
    """The handle of a worker's gossip.

    Collective calls must be made by every worker. They bring all workers to the same round first, whatever each has
    skipped.
    """

    elastic = False
    """Whether members may die, leave and join (`on_failure="continue"`)."""
    joined = False
    """Whether this worker joined a job that was already training."""

    def __init__(
        self,
        prepared: Prepared,
        lanes: Sequence[Lane],
        transport: Transport,
        coordinator: Coordinator,
        writer: TraceWriter | None,
        inside: Sequence[NodeGradients] = (),
    ):
        self.model, self.settings, self.lanes = prepared.model, prepared.settings, lanes
        self.transport, self.coordinator = transport, coordinator
        channel = transport.channel(ChannelId(0, Purpose.CONTROL), 1, self.settings.timeout)
        self.control = Control(prepared.rank, prepared.layout, channel)
        self.gradients = prepared.gradients
        """"node": gradients are averaged exactly inside each node. "worker": each worker steps on its own."""
        self._inside = inside  # gradients averaged inside the node, one entry per lane or none
        self._writer = writer
        self._shards = prepared.shard[1]  # over how many workers of a node one replica is spread
        self._open = True
        self._shared = 0  # calls of share()
        self._distance: float | None = None  # the consensus distance when it was last measured exactly
        self._apart = False  # the workers' parameters have differed
        self._equal_at: int | None = None  # steps at which they were equal
        self._clippers: dict[str, GradientClipper] = {}  # by the part of the model
        self._undo: list[Callable[[], None]] = []
        for lane in lanes:
            lane.keeps_alive.append(self)
        _handles.add(self)
        self._undo += watch_loads(self.model, self._loaded)
        for lane, averaged in zip(lanes, inside, strict=False):
            lane.checks.append(averaged.check)
            self.on_stop(averaged.close)
        if writer is not None:
            self._undo += watch_forward(self.model, lanes[0].forwarded)

    # -- collective calls -------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Hold the consensus model inside the block, to evaluate or save it. Collective.

        Inside the block the parameters are the exact mean over all workers. Unless `buffers="local"`, floating-point
        buffers are the mean and integer buffers the maximum. After the block everything is restored bit by bit.
        """
        restore = self._collectively("averaged()", self._enter_average)
        try:
            yield self.model
        finally:
            restore()

    def consensus_distance(self, *, exact: bool = True) -> float:
        """The RMS distance of the workers' parameters to their mean, sqrt(1/n sum_i |x_i - mean|^2).

        `exact=True` is collective. `exact=False` returns the latest sketch (needs `guard=`), at no cost.
        """
        if not exact:
            if all(lane.alone for lane in self.lanes):
                return 0.0
            sketches = [lane.sketcher.latest for lane in self.lanes if lane.sketcher is not None]
            if not sketches:
                raise InputError("there is no sketch without a guard; pass guard=ConsensusGuard() or call exact=True")
            return sum(s.distance**2 for s in sketches if s is not None) ** 0.5 if all(sketches) else float("nan")
        self._distance = float(self._collectively("consensus_distance()", self._measure_distance))
        self._warn_if_equal(self._distance)
        return self._distance

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the model and the optimizer. Collective; changes nothing.

        Save it per worker, together with that worker's own `model.state_dict()` and `optimizer.state_dict()`.
        """
        with self._together("state_dict()"):
            return self._state()

    def _state(self) -> dict[str, Any]:
        return {
            **self._identity.state_dict(),
            "clipping": {part: clipper.state_dict() for part, clipper in self._clippers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; load the model's and the optimizer's state first. Collective."""
        problem: InputError | None = None
        try:
            self._check_state(state)
        except InputError as error:  # the other workers must hear of it first
            problem = error
        with self._together("load_state_dict()"):
            flags = torch.zeros(self.control.layout.n)
            flags[self.control.place] = problem is not None
            refusing = self._run(self.control.average(flags)).nonzero().flatten().tolist()
            if problem is not None:
                raise problem
            if refusing:
                raise InputError(
                    f"worker(s) {', '.join(map(str, refusing))} cannot load the state given there, so no worker loads; "
                    "pass to every worker the state that was saved for it"
                )
            self._load(state)

    def reset(self) -> None:
        """Continue from the parameters as they are now. Collective.

        Call it after writing to the parameters yourself, for example by `model.load_state_dict()`.
        """
        self._equal_at = None
        with self._together("reset()"):
            for lane in self.lanes:
                lane.restart()

    # -- the protocol of recipes, checkpoints and integrations ------------------------------------------------

    @property
    def in_meeting(self) -> bool:
        """Whether this worker is inside `averaged()`, so that calls there belong to the same meeting."""
        return self.lanes[0].averaged > 0

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that each worker of this process has taken: one entry."""
        return [self.lanes[0].metrics.steps]

    def participation(self) -> Participation:
        """The workers that took part in the latest collective call: all of them, unless the job is elastic."""
        inside = self.lanes[0].schedule.inside
        groups = [(w,) for w in range(self.control.layout.n)] if inside is None else inside.members
        return Participation(self.control.layout.n, (self.control.place,), tuple(tuple(g) for g in groups))

    def share(self, text: str) -> list[str]:
        """The texts of all participants, by number. Collective."""
        self._shared += 1
        return self.transport.share(f"share/{self._shared}", text)

    def state_dicts(self) -> list[dict[str, Any]]:
        """`state_dict()` of each worker of this process: one entry. Collective."""
        return [self.state_dict()]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """`load_state_dict()` of each worker of this process. Collective."""
        (state,) = states
        self.load_state_dict(state)

    def accepts(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dict` can continue from `state`: same algorithm, workers, topology, optimizers, cut."""
        return self._identity.accepts(state)

    def restart(self, steps: int) -> None:
        """Continue from the parameters as they are now, with `steps` steps counted. Collective."""
        with self._together("restart()"):
            for lane in self.lanes:
                lane.restart()
                lane.count_steps(steps)

    def mixed_parameters(self) -> list[MixedParameters]:
        """Which parameters are mixed, for each worker of this process: one entry."""
        lanes = tuple(
            tuple((flat.buffer.numel(), tuple((p.parameter, p.start) for p in flat.places)) for flat in lane.flats)
            for lane in self.lanes
        )
        return [MixedParameters(lanes, self.settings.buffers)]

    @property
    def _identity(self) -> Identity:
        topology = self.lanes[0].schedule.topology
        kind = self.settings.algorithm.name if self.settings.asynchronous else None
        return Identity(self.control.layout.n, topology.n, topology.name, self.gradients, kind, self.lanes)

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self, *, average: bool = True) -> None:
        """Stop gossip and give every parameter memory of its own again. Collective.

        Afterwards every worker holds the exact mean of all workers, parameters and buffers as in `averaged()`. With
        `average=False`, on all workers, every worker keeps its own values.
        """
        if self._open:
            call = "close()" if average else "close(average=False)"
            self._refuse_in_average(call)
            try:
                with self._together(call):
                    if average:
                        self._run(self._keep_average())
                    for lane in self.lanes:
                        lane.drop()
                    self._stop(drain=self.settings.timeout)
            finally:
                self._stop(drain=0.0)  # not all workers came: leave without them

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # this worker has failed: do not wait for the others, nor let them wait
            if self._open:
                self.transport.fail()
            self._stop(drain=0.0)

    # -- progress ---------------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Steps of all workers together, as far as this worker knows.

        Asynchronous workers learn of each other's steps in exchanges, so the number lags a little.
        """
        return self.lanes[0].total_steps()

    def budget(self, total_steps: int) -> Iterator[int]:
        """Iterate until all workers together have taken `total_steps` steps: `for done in gossip.budget(N): ...`.

        Yields the number of steps done so far, for learning-rate schedules that follow global progress. Fast workers
        take more steps. Asynchronous workers overshoot by the steps that they had not yet learned of when they stopped.
        """
        if total_steps < 1:
            raise InputError(f"a budget must be a positive number of steps, got {total_steps}")
        while (done := self.total_steps) < total_steps:
            yield done

    # -- local calls ------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Replicas whose parameters are mixed: the workers, or the nodes with exact averaging inside a node."""
        return self.lanes[0].schedule.topology.n

    def clip_grad_norm_(
        self,
        max_norm: float,
        parameters: Tensor | Iterable[Tensor] | None = None,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip this worker's gradients as all-reduce would at `max_norm`; return their norm. Local.

        The norm of a local gradient is up to √replicas times that of the averaged gradient, so
        `torch.nn.utils.clip_grad_norm_` with the threshold of all-reduce would clip nearly every step. This call
        estimates the norm of the averaged gradient, from this worker's own gradients or from the share of the signal
        that was measured for GossipAdam, and clips where that exceeds `max_norm`. Call it once per step where you call
        torch's: before `optimizer.step()`, and after `GradScaler.unscale_()`. `parameters`, one or several, clips a
        part of the model by its own norm; default: all parameters. Without the measured share, DTensor parameters are
        clipped at √replicas times `max_norm`, which lets spikes pass.
        """
        every = list(self.model.parameters())
        chosen: list[Tensor] = [*every]
        if parameters is not None:
            chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not chosen:
            raise InputError("clip_grad_norm_() was given no parameters to clip; leave `parameters` out to clip all")
        places = {id(p): i for i, p in enumerate(every)}
        key = f"{places.get(id(chosen[0]), -1)}+{sum(p.numel() for p in chosen)}"  # the same part in a resumed run
        clipper = self._clippers.setdefault(key, GradientClipper())
        meter = self.lanes[0].meter if len(self.lanes) == 1 else None
        share = None if meter is None else meter.share
        return clipper.clip(
            chosen, max_norm, self.replicas, share, error_if_nonfinite=error_if_nonfinite, foreach=foreach
        )

    def stats(self) -> dict[str, Any]:
        """Steps, rounds, bytes sent, and seconds waited by peer and by link, summed over the lanes. Local.

        `lanes` has the numbers of each lane. The steps are those of the first lane.
        """
        return {**summed(self.lanes), "gradients": self.gradients}

    def scalars(self, prefix: str = "gossip/") -> dict[str, float]:
        """Plain numbers for an experiment tracker, each name with `prefix`. Local, and cheap enough for every step.

        `steps` and `rounds` continue after a resume; bytes, seconds and other counts are those of this process.
        `seconds_per_step` and `waiting_share`, the share of that time spent waiting for peers, are over the last 50
        steps. `consensus_distance` is the latest estimate of a `ConsensusGuard`, or else the result of the latest
        `consensus_distance()`. A number that is not known yet is left out.
        """
        guarded = any(lane.sketcher is not None for lane in self.lanes)
        distance = self.consensus_distance(exact=False) if guarded else self._distance
        found = {**numbers(self.stats(), self.lanes), "replicas": self.replicas, "consensus_distance": distance}
        return {prefix + name: float(v) for name, v in found.items() if v is not None and math.isfinite(v)}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without averaging them in the node, as DDP's `no_sync()`. Local.

        Put forward and backward of every batch but the last one before a step inside the block. Without exact averages
        inside the node the block does nothing; a model sharded by FSDP2 has its own `set_requires_gradient_sync()`.
        """
        with ExitStack() as blocks:
            for averaged in self._inside:
                blocks.enter_context(averaged.no_sync())
            yield

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the handle stops."""
        self._undo.append(undo)

    # -- inside -----------------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        """The model's `load_state_dict()` was called: the parameters are no longer those that are being exchanged."""
        self._equal_at = None
        for lane in self.lanes:
            if not lane.averaged:  # the end of an averaged() block restores the parameters
                lane.overwritten = True

    def _refuse_in_average(self, call: str) -> None:
        if self.in_meeting:
            raise GossamerError(
                f"{call} inside `with gossip.averaged()`: the end of the block restores the parameters, which gossip "
                "must still hold then; leave the block first"
            )

    @contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Inside the block, all workers are in the same call, at the same round, and nothing is in flight."""
        if not self._open:
            raise GossamerError(f"{call} after close(); call decentralize() again to go on")
        self._warn_if_unseen()
        try:
            for lane in self.lanes:
                lane.park()
            self._meet(call)
            for lane in self.lanes:
                lane.settle()
            yield
        finally:
            for lane in self.lanes:
                lane.resume()

    def _meet(self, call: str) -> None:
        self.coordinator.meet(self.lanes, call)

    def _warn_if_unseen(self) -> None:
        for lane in self.lanes:
            if lane.trained_unseen():
                warnings.warn(
                    f"the parameters have changed since decentralize(), but no step of {type(lane.optimizer).__name__} "
                    "was seen, so nothing has been exchanged; call step() on the optimizer that was passed to "
                    "decentralize(), not on another one or on a wrapped one. After writing to the parameters yourself "
                    "call reset()",
                    GossamerWarning,
                    stacklevel=5,
                )

    def _warn_if_equal(self, distance: float) -> None:
        """Warn, once, if all workers held equal parameters in every measurement, with steps between them.

        Adapt then combine is left out: a round that is an exact average makes the workers equal.
        """
        norm = math.hypot(*(norm for lane in self.lanes for norm in lane.norms()))
        self._apart |= not distance <= EQUAL * norm  # not a number: say nothing
        if self._apart or self.replicas == 1 or isinstance(self.settings.algorithm, ATC):
            return
        before, self._equal_at = self._equal_at, self.lanes[0].metrics.steps
        if before is not None and before < self._equal_at:
            self._apart = True  # say it once
            if self.control.place == 0:
                warnings.warn(
                    f"the consensus distance is still 0 after {self._equal_at} steps: the {self.replicas} replicas "
                    "take equal steps, so gossip does nothing; let each train on its own data, and switch off DDP or "
                    "whatever else averages their gradients",
                    GossamerWarning,
                    stacklevel=3,
                )

    def _collectively(self, call: str, steps: Callable[[], Collective]) -> Any:
        with self._together(call):
            return self._run(steps())

    def _run(self, steps: Collective) -> Any:
        """Run a collective on this worker: wait for the exchanges that it yields."""
        try:
            while True:
                for job in next(steps):
                    self.lanes[0].wait(job)
        except StopIteration as stop:
            return stop.value

    def _enter_average(self) -> Collective:
        return hold_mean(self.lanes, self.control, self._module_of_averaged_buffers)

    def _keep_average(self) -> Collective:
        return keep_mean(self.lanes, self.control, self._module_of_averaged_buffers)

    @property
    def _module_of_averaged_buffers(self) -> nn.Module | None:
        return self.model if self.settings.buffers == "average" else None

    def _measure_distance(self) -> Collective:
        return distance(self.lanes, self.control, self._shards)

    def _check_state(self, state: dict[str, Any]) -> None:
        self._identity.check(state)

    def _load(self, state: dict[str, Any]) -> None:
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.load_state_dict(saved)
        self._clippers = {}
        for part, saved in state["clipping"].items():
            self._clippers[part] = GradientClipper()
            self._clippers[part].load_state_dict(saved)

    def _stop(self, drain: float) -> None:
        if not self._open:
            return
        self._open = False
        _handles.discard(self)
        with ExitStack() as ends:  # runs all callbacks, last one first, even if Ctrl-C interrupts one
            ends.callback(self.transport.close)
            if self._writer is not None:
                ends.callback(self._writer.close)
            for undo in self._undo:
                ends.callback(undo)
            ends.callback(self.control.channel.close, drain)
            for lane in self.lanes:
                for flat in lane.flats:
                    ends.callback(flat.release)
                ends.callback(_leave_alone, lane.optimizer)
                ends.callback(lane.close, drain)


def _leave_alone(optimizer: Optimizer) -> None:
    """Tell an optimizer that gossip has ended, and that it trains by itself from now on."""
    if isinstance(optimizer, ScalesWithReplicas):
        optimizer.set_replicas(1)
    if isinstance(optimizer, UsesSignal):
        optimizer.set_signal_shares({})
    if isinstance(optimizer, KnowsLocalParameters):
        optimizer.set_local_parameters(())


_handles: weakref.WeakSet[Gossip] = weakref.WeakSet()


def refuse_in_use(model: nn.Module) -> None:
    """Refuse a model whose parameters an open handle mixes already."""
    mine = {id(p): name for name, p in model.named_parameters()}
    for gossip in list(_handles):
        for place in (p for lane in gossip.lanes for flat in lane.flats for p in flat.places):
            if id(place.parameter) in mine:
                raise InputError(
                    f"parameter {mine[id(place.parameter)]!r} is mixed by an earlier decentralize() call that is still "
                    "open; close() its handle first"
                )


@atexit.register
def _close_all() -> None:
    """At exit, for handles that were not closed: let exchanges in flight finish, then stop."""
    for gossip in list(_handles):
        with suppress(Exception):  # the devices may be gone
            gossip._warn_if_unseen()
        gossip._stop(drain=10.0)
