"""Who trains in this process: one worker among others (gossip or DDP), or all of them (virtual).

Every crew offers the loop the same few calls. Calls that need the others must be made by every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.recipes.config import RunConfig
from gossamer.recipes.methods import Method, gossip_settings, refuse_unfit
from gossamer.recipes.replica import Replica, make_replica
from gossamer.recipes.task import Task

Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]  # into torch's DDP
WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Strategy:
    """The replicas of this process. `places` are their numbers among the `total` of all processes."""

    lockstep = False  # nobody can finish a step that another worker has not begun
    survives = False  # the job outlives its workers
    joined = False  # this worker came when the others trained already
    handle: Any = None  # what gossips: a Gossip, a VirtualCluster, or nothing

    def __init__(self, replicas: Sequence[Replica], places: Sequence[int], total: int):
        self.replicas, self.places, self.total = list(replicas), list(places), total

    @property
    def leads(self) -> bool:
        """Whether this process evaluates and keeps the records."""
        return 0 in self.places

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The consensus model."""
        raise NotImplementedError

    def consensus_distance(self) -> float:
        return 0.0

    def bytes_sent(self) -> float:
        """By one worker since the start (of this process), as far as it is known."""
        return 0.0

    def seconds_waited(self) -> float | None:
        """By one worker for others, since the start of this process; None where it cannot be told."""
        return None

    def advanced(self, step: int) -> int:
        """How many steps are done, `step` by this process's own count; more if it was away and the others went on, or
        if those it has met are further."""
        return step

    def newcomer(self) -> bool:
        """Whether this worker was given a member's state (it joined, or was away) since this was asked last."""
        return False

    def skip_meeting(self) -> None:
        """Do not come to the meeting that the member who gave this worker its state was about to come to."""

    def checkpoints(self, folder: Path, keep_last: int) -> gossamer.Checkpoints:
        alone = {} if self.handle is not None else {"rank": self.places[0], "workers": self.total}
        return gossamer.Checkpoints(folder, keep_last=keep_last, **alone)

    def save(self, checkpoints: gossamer.Checkpoints, step: int, progress: dict[str, Any]) -> None:
        extras = [{**r.state_dict(), "progress": progress} for r in self.replicas]
        models, optimizers = [r.model for r in self.replicas], [r.optimizer for r in self.replicas]
        if self._together:
            checkpoints.save(self.handle, models, optimizers, step=step, extra=extras)
        else:
            number = None if self.survives else step  # workers may be at different steps there: they agree on one
            checkpoints.save(self.handle, models[0], optimizers[0], step=number, extra=extras[0])

    def load(self, checkpoints: gossamer.Checkpoints) -> dict[str, Any]:
        """Go on from the newest checkpoint; the progress it holds."""
        models, optimizers = [r.model for r in self.replicas], [r.optimizer for r in self.replicas]
        if self._together:
            loaded = checkpoints.load(self.handle, models, optimizers)
        else:
            loaded = checkpoints.load(self.handle, models[0], optimizers[0])
        for replica, saved in zip(self.replicas, loaded.extras, strict=True):
            replica.load_state_dict(saved)
        progress: dict[str, Any] = loaded.extra["progress"]
        return progress

    @property
    def _together(self) -> bool:
        return isinstance(self.handle, gossamer.VirtualCluster)

    def close(self) -> None:
        pass


def reduced_bytes(model: nn.Module, workers: int, wire: str = "fp32") -> float:
    """What a worker sends in an all-reduce of the gradients: 2 (n - 1) / n of their size."""
    return 2 * (workers - 1) / workers * WIRE_BYTES[wire] * sum(p.numel() for p in model.parameters())


class GossipStrategy(Strategy):
    """This process is one of n workers that gossip."""

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, trace: Path | None):
        replica = make_replica(task, method, config, [rank])
        self._inside = 0.0
        if config.exact_inside:
            replica.forward = DistributedDataParallel(replica.model, process_group=gossamer.node_group())
            here = config.per_node[gossamer.Layout.of(config.per_node).node[rank]]
            self._inside = reduced_bytes(replica.model, here)
        settings = gossip_settings(method, config)
        self.survives, self._batches = config.on_failure == "continue", config.micro_batches
        self.gossip = self.handle = gossamer.decentralize(
            replica.forward,
            replica.optimizer,
            trace=trace,
            **settings,
        )
        self.joined = self.survives and bool(self.gossip.stats()["joined"])
        super().__init__([replica], [rank], config.workers)

    @property
    def leads(self) -> bool:
        """Where the job outlives its workers, the first of those who came to the last meeting."""
        return self.handle.control.place == 0 if self.survives else super().leads

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.gossip.averaged()

    def consensus_distance(self) -> float:
        # A pause is one meeting where workers come and go: who joins in it has missed nothing.
        return float("nan") if self.survives else self.gossip.consensus_distance()

    def advanced(self, step: int) -> int:
        if not self.survives:
            return step
        self.handle.catch_up()
        taken = int(self.gossip.stats()["steps"])
        if taken != step:  # this worker joined, or was away: schedule and data go where its new state is
            self.replicas[0].go_to(taken, taken * self._batches)
        return taken

    def newcomer(self) -> bool:
        return self.survives and bool(self.handle.acknowledge_join())

    def skip_meeting(self) -> None:
        self.handle.skip_meeting()

    def bytes_sent(self) -> float:
        stats = self.gossip.stats()
        return float(stats["bytes_sent"] + self._inside * stats["steps"])

    def seconds_waited(self) -> float:
        return float(self.gossip.stats()["seconds_waited"])

    def close(self) -> None:
        self.gossip.close()


class DdpStrategy(Strategy):
    """This process is one of n workers under torch's own DDP. `wrap` may give it hooks (a wire, a timeline)."""

    lockstep = True

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, wrap: Wrap | None = None):
        replica = make_replica(task, method, config, [rank])
        if wrap is None:
            replica.forward = DistributedDataParallel(replica.model, bucket_cap_mb=config.ddp_bucket_mb)
        else:
            replica.forward = wrap(replica.model, replica.optimizer)
        self._a_step = reduced_bytes(replica.model, config.workers, method.wire)
        super().__init__([replica], [rank], config.workers)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        yield self.replicas[0].model

    def bytes_sent(self) -> float:
        return self._a_step * self.replicas[0].scheduler.last_epoch


class VirtualStrategy(Strategy):
    """All workers in this process. Workers that average gradients exactly share a replica: all under DDP, a node's
    with `exact_inside`, else each has its own."""

    def __init__(self, task: Task, method: Method, config: RunConfig):
        refuse_unfit(method, config)
        layout = gossamer.Layout.of(config.per_node)
        everyone = tuple(range(layout.n))
        if method.algorithm == "ddp":
            groups: Sequence[Sequence[int]] = [everyone]
        elif config.exact_inside:
            groups = layout.members
        else:
            groups = [(w,) for w in everyone]
        replicas = [make_replica(task, method, config, g) for g in groups]
        super().__init__(replicas, range(len(groups)), len(groups))
        self._workers = layout.n
        inside = (len(group) * reduced_bytes(replicas[0].model, len(group)) for group in groups)
        self._inside = sum(inside) / layout.n  # of one worker on average: nodes may differ
        self.cluster: gossamer.VirtualCluster | None = None
        if method.algorithm != "ddp":
            per_node = [1] * len(groups) if config.exact_inside else config.per_node
            self.cluster = self.handle = gossamer.VirtualCluster(per_node=per_node)
            models, optimizers = [r.model for r in replicas], [r.optimizer for r in replicas]
            self.cluster.decentralize(models, optimizers, **gossip_settings(method, config))

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        if self.cluster is None:
            yield self.replicas[0].model
        else:
            with self.cluster.averaged() as model:
                yield model

    def consensus_distance(self) -> float:
        return 0.0 if self.cluster is None else self.cluster.consensus_distance()

    def bytes_sent(self) -> float:
        gossips = [] if self.cluster is None else self.cluster.gossips
        between = sum(g.stats()["bytes_sent"] for g in gossips) / self._workers
        return float(between + self._inside * self.replicas[0].scheduler.last_epoch)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
