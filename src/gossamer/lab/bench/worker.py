"""A worker of a benchmark: train the emulated model with one method and measure it.

All workers start together at a barrier. The warm-up, in which connections and buffers are made and waiting becomes
steady, is not counted. There is no second barrier after it, because that would give gossip a head start. Asynchronous
workers warm up until all have exchanged, and continue after their window until all are done, so that no worker lacks
a partner while it is measured. Times are `time.monotonic()`, which is the same clock in all processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import gossamer
from gossamer.comm import PrefixStore, baseline, default_store, process_groups
from gossamer.comm.torchft_peer import PeerName, TorchftPeer
from gossamer.errors import GossamerError
from gossamer.lab.bench.setup import DECENT_DP, Setup, emulated
from gossamer.lab.cpu import CpuTimes
from gossamer.lab.emulate import FORWARD, EmulatedModel
from gossamer.predict.methods import Method
from gossamer.trace import TraceWriter

# Called with the category, start and end (perf_counter) and attributes of a span.
Watch = Callable[[str, float, float, dict[str, Any]], None]


@dataclass(frozen=True)
class MethodRun:
    """The settings of one run. `seconds_of[rank]` are the compute times of a worker, one per step, warm-up included."""

    method: Method
    setup: Setup
    seconds_of: tuple[tuple[float, ...], ...]
    steps: int
    warmup: int
    seconds: float | None = None  # run for this long instead of `steps`
    timeout: float = 120.0  # seconds that a worker waits for another
    bucket_mb: float | None = None  # MiB
    options: dict[str, Any] = field(default_factory=dict)  # settings of the algorithm's policy, or of torchft
    gradients: Literal["worker", "node"] = "worker"
    trace: str | None = None


@dataclass
class BenchTrainer:
    """Trains a model with one method, step by step. `finish()` is collective."""

    forward: nn.Module
    model: EmulatedModel
    optimizer: torch.optim.Optimizer | None  # None: the package steps inside backward
    gossip: gossamer.Gossip | None = None  # None: another package
    finish: Callable[[], Any] = lambda: None
    watch: Watch | None = None
    cause: str = "exchange"  # what the backward pass waits for, if the package is not Gossamer
    peer: TorchftPeer | None = None
    late: float = 0.0  # seconds that the backward pass took beyond its compute
    taken: int = 0  # steps

    def step(self) -> None:
        start = time.perf_counter()
        loss = self.forward()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        computed = min(end, middle + (1 - FORWARD) * self.model.step_seconds)
        self.late += end - computed
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.watch is not None:
            here = {"step": self.taken}
            self.watch("forward", start, middle, here)
            self.watch("backward", middle, computed, here)
            self.watch("wait", computed, end, here)
            self.watch("step", end, time.perf_counter(), here)
        self.taken += 1

    def exchanging(self) -> bool:
        """Whether this worker has exchanged, or has no peer."""
        assert self.gossip is not None
        stats = self.gossip.stats()
        return bool(stats["rounds"] > 0 or not stats["bytes_sent_by_peer"])

    def counters(self) -> dict[str, float]:
        """Counters that only grow: seconds waited as `wait:CAUSE`, bytes sent as `sent:RANK`, and numbers of rounds."""
        if self.peer is not None:
            return {f"wait:{self.cause}": self.peer.seconds_waited}
        if self.gossip is None:
            return {f"wait:{self.cause}": self.late}
        stats = self.gossip.stats()
        waits = {f"wait:{link}": s for link, s in stats["seconds_waited_by_link"].items()}
        other = stats["seconds_waited"] - sum(waits.values())
        sent = {f"sent:{peer}": float(b) for peer, b in stats["bytes_sent_by_peer"].items()}
        rounds = {"rounds": float(stats["rounds"]), "skipped": float(stats["skipped_mixes"])}
        return {**waits, "wait:own machine": max(0.0, other), **sent, **rounds}


def optimizer_of(name: str, parameters: Iterable[Tensor], lr: float = 1e-3) -> torch.optim.Optimizer:
    """The optimizer of a method; all packages get the same one."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)
    if name == "gossipadam":
        return gossamer.GossipAdam(parameters, lr=lr)
    if name == "accumadam":
        return gossamer.AccumAdam(parameters, lr=lr, accumulate=4)
    assert name == "adam", name
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def trainer(run: MethodRun, model: EmulatedModel, watch: Watch | None) -> BenchTrainer:
    method = run.method
    if method.package == "decent-dp":
        return _decent_dp(run, model, watch)
    optimizer = optimizer_of(method.optimizer, model.parameters())
    if method.exact:

        def sent(start: float, end: float, size: int) -> None:
            assert watch is not None
            watch("exchange", start, end, {"bytes": size})

        if method.algorithm == "local":
            name = cast(PeerName, method.name)
            peer = TorchftPeer(name, model, optimizer, sent=sent if watch else None, **run.options)
            return BenchTrainer(model, model, optimizer, finish=peer.close, watch=watch, cause="all-reduce", peer=peer)
        wrapped = baseline.ddp(model, bucket_mb=run.bucket_mb, wire=method.wire, sent=sent if watch else None)
        return BenchTrainer(wrapped, model, optimizer, watch=watch, cause="all-reduce")
    gossip = gossamer.decentralize(
        model,
        optimizer,
        topology=method.topology or "aer",
        algorithm=gossamer.algorithm(method.algorithm, **run.options),
        gradients=run.gradients,
        wire=method.wire,
        exchange=gossamer.Exchange(bucket_mib=run.bucket_mb),
        timeout=run.timeout,
        trace=run.trace,
    )
    # Nobody needs the mean of the workers, and an average of the whole model would take minutes on thin links.
    return BenchTrainer(model, model, optimizer, gossip, partial(gossip.close, average=False))


def _decent_dp(run: MethodRun, model: EmulatedModel, watch: Watch | None) -> BenchTrainer:
    from decent_dp.ddp import DecentralizedDataParallel

    assert run.method.topology is not None
    wrapped = DecentralizedDataParallel(
        model,
        lambda named: optimizer_of(run.method.optimizer, [p for _, p in named]),
        topology=DECENT_DP[run.method.topology],
        bucket_size_in_mb=25 if run.bucket_mb is None else run.bucket_mb,  # MiB; fractions work
    )
    # global_avg waits for exchanges in flight
    return BenchTrainer(wrapped, model, None, finish=wrapped.global_avg, watch=watch)


def work(rank: int, run: MethodRun) -> dict[str, Any]:
    """Train; return `begin` and `end` of the measured window, its `steps` and costs, and the steps `warmed` before."""
    torch.set_num_threads(1)
    _, size = process_groups.join_world()
    writer, watch = _recorder(run, rank, size)
    model = emulated(run.setup, list(run.seconds_of[rank]))
    training = trainer(run, model, watch)
    process_groups.wait_for_all()
    warm = time.monotonic()
    for _ in range(run.warmup):
        training.step()
    barrier = _Barrier(size, run.timeout) if run.method.asynchronous else None
    if barrier is not None:
        barrier.step_until(training, "exchanging", training.exchanging)
        model.step = run.warmup - 1  # all methods are measured with the same compute times, whatever their warm-up
    warmed = training.taken
    steps, deadline = _until(run, training, warm)
    before, begin = _readings(training), time.monotonic()
    taken = 0
    while taken < steps if deadline is None else time.monotonic() < deadline:
        training.step()
        taken += 1
    end = time.monotonic()
    after = _readings(training)
    if barrier is not None:
        barrier.step_until(training, "done", lambda: True)
    training.finish()
    if writer is not None:
        writer.close()
    process_groups.leave_world()
    return {"begin": begin, "end": end, "steps": taken, "warmed": warmed, **_spent(before, after)}


class _Barrier:
    """Lets asynchronous workers wait for each other while they train, by counters in the store of the job."""

    def __init__(self, size: int, timeout: float) -> None:
        self._size, self._timeout = size, timeout
        store = default_store().clone()  # type: ignore[attr-defined]  # others may block on theirs
        self._store = PrefixStore("gossamer/bench", store)

    def step_until(self, training: BenchTrainer, what: str, ready: Callable[[], bool]) -> None:
        """Take steps until all workers are ready; all of them return within one step of each other."""
        posted, since = False, time.monotonic()
        while True:
            if not posted and ready():
                self._store.add(what, 1)
                posted = True
            missing = self._size - self._store.add(what, 0)
            if not missing:
                return
            if time.monotonic() - since > self._timeout:
                raise GossamerError(
                    f"{missing} of {self._size} workers were not {what} after {self._timeout:.0f} s of training; "
                    "use a smaller model or faster links"
                )
            training.step()


def _until(run: MethodRun, training: BenchTrainer, warm: float) -> tuple[int, float | None]:
    """The number of steps, or a deadline. All packages but Gossamer need the same number on all workers."""
    if run.seconds is None:
        return run.steps, None
    if training.gossip is None:
        each = process_groups.largest((time.monotonic() - warm) / run.warmup)
        return max(1, round(run.seconds / each)), None
    return 0, time.monotonic() + run.seconds


def _recorder(run: MethodRun, rank: int, size: int) -> tuple[TraceWriter | None, Watch | None]:
    """Record the spans of other packages; Gossamer records its own."""
    if run.trace is None or run.method.package == "gossamer":
        return None, None
    nodes = [node for node, count in enumerate(run.setup.per_node) for _ in range(count)]
    writer = TraceWriter(Path(run.trace), rank, nodes)
    shift = writer.now() - time.perf_counter()

    def watch(category: str, start: float, end: float, attrs: dict[str, Any]) -> None:
        writer.record(category, start + shift, end + shift, **attrs)

    return writer, watch


@dataclass(frozen=True)
class _Readings:
    cpu: CpuTimes | None
    own: float
    nic: tuple[int, int] | None
    counters: dict[str, float]


def _readings(training: BenchTrainer) -> _Readings:
    return _Readings(CpuTimes.now(), time.process_time(), interface_bytes(), training.counters())


def _spent(before: _Readings, after: _Readings) -> dict[str, Any]:
    counted = {k: v - before.counters.get(k, 0.0) for k, v in after.counters.items()}
    nic = None
    if before.nic is not None and after.nic is not None:
        nic = {"sent": after.nic[0] - before.nic[0], "received": after.nic[1] - before.nic[1]}
    return {
        "cpu_use": before.cpu.use_until(after.cpu) if before.cpu and after.cpu else None,
        "own_cpu_seconds": after.own - before.own,
        "interface": nic,
        "waited": {k[5:]: v for k, v in counted.items() if k.startswith("wait:")},
        "sent": {int(k[5:]): v for k, v in counted.items() if k.startswith("sent:")},
        "rounds": counted.get("rounds"),
        "skipped_mixes": counted.get("skipped"),
    }


def interface_bytes() -> tuple[int, int] | None:
    """Bytes sent and received by this worker's node so far, headers included; None on loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        device, _, numbers = line.partition(":")
        if device.strip() == name and name != "lo":
            values = numbers.split()
            return int(values[8]), int(values[0])
    return None
