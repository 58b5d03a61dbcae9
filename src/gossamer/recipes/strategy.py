"""How the replicas of a process are trained: by gossip with other workers, by DDP, or as virtual workers.

Every strategy offers the training loop the same calls. Calls that are marked collective must be made by every worker.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer import GossamerError, InputError
from gossamer.recipes.config import RunConfig
from gossamer.recipes.graceful_stop import Stop, StopAlone, StopHere, StopTogether
from gossamer.recipes.methods import Method, gossip_settings, refuse_unfit
from gossamer.recipes.replica import Replica, make_replica
from gossamer.recipes.task import Task

Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]  # into torch's DDP, or a `Peer`
WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Pause(Protocol):
    """What all workers do together after a step: evaluate, save, or both."""

    evaluates: bool
    saves: bool

    def evaluate(self, inside: Callable[[], None] | None = None) -> None:
        """Evaluate the averaged model and log the result; call `inside` while the parameters are the mean."""

    def save(self) -> None:
        """Save a checkpoint."""

    def advance(self) -> None:
        """Set the step count to that of the furthest worker in the meeting."""


class Peer(Protocol):
    """Another package that trains a model by local steps and exact averages."""

    @property
    def seconds_waited(self) -> float: ...
    @property
    def bytes_sent(self) -> float: ...
    def averaged(self) -> AbstractContextManager[nn.Module]: ...
    def close(self) -> None: ...


class Strategy(ABC):
    """The replicas of this process; `places` are their numbers among the `total` replicas of all processes."""

    lockstep = False
    """No worker can finish a step that another worker has not started."""

    steps_to_round = 1
    """Steps within which a worker takes part in its next round."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        places: Sequence[int],
        total: int,
        handle: gossamer.GossipHandle | None,
    ):
        self.replicas, self.places, self.total, self.handle = list(replicas), list(places), total, handle

    # -- what the loop reads -----------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process evaluates."""
        return 0 in self.places

    @property
    def joined(self) -> bool:
        """Whether this worker joined a job that was already training."""
        return False

    @property
    def leaving(self) -> bool:
        """Whether this worker was asked to leave the others, which continue without it."""
        return False

    def workers_of(self, replica: Replica) -> int:
        """Return the number of workers whose batches make the replica's gradient, in all processes."""
        return len(replica.members)

    def bytes_sent(self) -> float:
        """Bytes that one worker has sent since the start of this process, as far as they are known."""
        return 0.0

    def waits(self) -> dict[str, Any] | None:
        """For which peers this process waited, and in how many buckets it exchanges; None without gossip."""
        return None

    def seconds_waited(self) -> float | None:
        """Seconds that one worker has waited for others since the start of this process; None if unknown."""
        return None

    def observe(self, losses: Sequence[float]) -> dict[int, dict[str, Any]]:
        """Return what is known of each worker of this process beyond its progress, by rank.

        `loss` is that of the worker's replica, one entry of `losses`. Gossip adds its `round`, the bytes `sent` and the
        seconds `waited` by peer since the start of the process, and an elastic job its `members`.
        """
        found: dict[int, dict[str, Any]] = {}
        for replica, loss in zip(self.replicas, losses, strict=True):
            for worker in replica.members:
                found[worker] = {"loss": loss}
            if replica.gossip is not None:
                found[replica.members[0]] |= self._observe_gossip(replica.gossip)
        return found

    def _observe_gossip(self, gossip: gossamer.Gossip) -> dict[str, Any]:
        stats = gossip.stats()
        seen = {
            "round": stats["rounds"],
            "sent": {self._rank_of(peer): b for peer, b in stats["bytes_sent_by_peer"].items()},
            "waited": {self._rank_of(peer): round(s, 4) for peer, s in stats["seconds_waited_by_peer"].items()},
        }
        return {**seen, "members": stats["members"]} if "members" in stats else seen

    def _rank_of(self, peer: int) -> int:
        """Return the worker that a gossip handle numbers `peer`."""
        return peer

    # -- collective --------------------------------------------------------------------------------------------

    @abstractmethod
    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Hold the consensus model inside the block. Collective."""

    def consensus_distance(self) -> float | None:
        """Return the consensus distance, or None if it is not measured. Collective."""
        return 0.0

    def pause(self, pause: Pause, stop: Stop, step: int) -> None:
        """Evaluate and save as `pause` asks. Collective."""
        if pause.evaluates:
            with stop.meeting(step):
                pause.evaluate()
        if pause.saves:
            with stop.meeting(step):
                pause.save()

    # -- steps and stops ---------------------------------------------------------------------------------------

    def advanced(self, step: int) -> int:
        """Return how many steps are done, where this process has counted `step`.

        An elastic worker returns more if it joined, was away, or has met workers that are further.
        """
        return step

    def misses_meeting(self, meets: bool) -> bool:
        """Return whether to skip the meeting after this step (`meets`: there is one). Called once per step.

        True for an elastic worker that received a member's state at this step: the others do not wait for it.
        """
        return False

    def needs_saving(self, step: int, *, began: int, saved: int) -> bool:
        """Return whether a run that is stopped at `step` saves a checkpoint."""
        return step > saved

    def make_stop(self, folder: Path) -> Stop:
        """Return how the workers of the run in `folder` agree to stop."""
        ahead = self.steps_to_round
        return StopTogether(folder, self.places[0], self.total, lockstep=self.lockstep, ahead=ahead)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def checkpoints(self, folder: Path, keep_last: int) -> gossamer.Checkpoints:
        """Open the run's checkpoints."""
        alone = {} if self.handle is not None else {"rank": self.places[0], "workers": self.total}
        return gossamer.Checkpoints(folder, keep_last=keep_last, **alone)

    def save(self, checkpoints: gossamer.Checkpoints, step: int | None, progress: dict[str, Any]) -> None:
        """Save models, optimizers, gossip and `progress`; without a step the workers agree on one. Collective."""
        extras = [{**r.state_dict(), "progress": progress} for r in self.replicas]
        models, optimizers = [r.model for r in self.replicas], [r.optimizer for r in self.replicas]
        checkpoints.save(self.handle, models, optimizers, step=step, extra=extras)

    def load(self, checkpoints: gossamer.Checkpoints) -> dict[str, Any]:
        """Load the newest checkpoint and return the progress that it holds. Collective."""
        models, optimizers = [r.model for r in self.replicas], [r.optimizer for r in self.replicas]
        loaded = checkpoints.load(self.handle, models, optimizers)
        for replica, saved in zip(self.replicas, loaded.extras, strict=True):
            replica.load_state_dict(saved)
        progress: dict[str, Any] = loaded.extra["progress"]
        return progress

    def finish(self, checkpoints: gossamer.Checkpoints) -> str:
        """Wait for the last checkpoint; returns why it could not be written if the job can end without it."""
        checkpoints.wait()
        return ""

    def close(self) -> None:
        """Stop gossip. Collective."""
        if self.handle is not None:
            self.handle.close()


def reduced_bytes(model: nn.Module, workers: int, wire: str = "fp32") -> float:
    """Return what a worker sends in an all-reduce of the gradients: 2 (n - 1) / n of their size."""
    return 2 * (workers - 1) / workers * WIRE_BYTES[wire] * sum(p.numel() for p in model.parameters())


class DdpStrategy(Strategy):
    """This process is one of n workers under torch's DDP. `wrap` may add hooks to it (a wire, a timeline)."""

    lockstep = True

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, wrap: Wrap | None = None):
        replica = make_replica(task, method, config, [rank])
        if wrap is None:
            wrapped = DistributedDataParallel(replica.model, bucket_cap_mb=config.ddp_bucket_mb)
        else:
            wrapped = wrap(replica.model, replica.optimizer)
        replica.forward, replica.no_sync = wrapped, wrapped.no_sync
        self._bytes_per_step = reduced_bytes(replica.model, config.workers, method.wire)
        super().__init__([replica], [rank], config.workers, None)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        yield self.replicas[0].model

    def workers_of(self, replica: Replica) -> int:
        return self.total

    def bytes_sent(self) -> float:
        return self._bytes_per_step * self.replicas[0].scheduler.last_epoch


class PeerStrategy(Strategy):
    """This process is one of n workers that another package averages every few steps: LocalSGD or DiLoCo of torchft."""

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, wrap: Wrap):
        self.steps_to_round = config.every
        replica = make_replica(task, method, config, [rank])
        self._peer: Peer = wrap(replica.model, replica.optimizer)
        super().__init__([replica], [rank], config.workers, None)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self._peer.averaged()

    def consensus_distance(self) -> None:
        """Not measured: the workers differ between two averages only."""

    def bytes_sent(self) -> float:
        return self._peer.bytes_sent

    def seconds_waited(self) -> float:
        return self._peer.seconds_waited

    def load(self, checkpoints: gossamer.Checkpoints) -> dict[str, Any]:
        raise InputError(
            "a run of diloco or localsgd on processes cannot be resumed: its outer point and momentum belong to "
            "torchft and are not in the checkpoint; start it again, or train it with --virtual"
        )

    def close(self) -> None:
        self._peer.close()


class GossipStrategy(Strategy):
    """This process is one of n workers that gossip."""

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, trace: Path | None):
        replica = make_replica(task, method, config, [rank])
        self._sharing = 1
        if config.exact_inside:
            self._sharing = config.per_node[gossamer.Layout.of(config.per_node).node[rank]]
        self._inside = reduced_bytes(replica.model, self._sharing)
        self.steps_to_round = config.every * (1 + config.staleness)
        settings = gossip_settings(method, config)
        inside: Literal["node", "worker"] = "node" if config.exact_inside else "worker"
        self.gossip = gossamer.decentralize(replica.model, replica.optimizer, gradients=inside, trace=trace, **settings)
        replica.gossip, replica.no_sync = self.gossip, self.gossip.no_sync
        super().__init__([replica], [rank], config.workers, self.gossip)

    def averaged(self) -> AbstractContextManager[nn.Module]:
        return self.gossip.averaged()

    def consensus_distance(self) -> float | None:
        return self.gossip.consensus_distance()

    def workers_of(self, replica: Replica) -> int:
        return self._sharing

    def bytes_sent(self) -> float:
        stats = self.gossip.stats()
        return float(stats["bytes_sent"] + self._inside * stats["steps"])

    def waits(self) -> dict[str, Any]:
        stats = self.gossip.stats()
        size = sum(p.numel() * p.element_size() for r in self.replicas for p in r.model.parameters())
        buckets = max(1, int(stats["buckets"]))
        by_peer = stats["seconds_waited_by_peer"]
        return {"by_peer": by_peer, "buckets": buckets, "bucket_bytes": size / buckets, "steps": stats["steps"]}

    def seconds_waited(self) -> float:
        return float(self.gossip.stats()["seconds_waited"])


class ElasticStrategy(GossipStrategy):
    """This process is a member of an elastic job: members may die, leave and join.

    A pause is a single meeting, in which every participant saves: a worker that joins meanwhile misses all of the
    meeting or takes part in all of it.
    """

    gossip: gossamer.ElasticGossip

    def __init__(self, task: Task, method: Method, config: RunConfig, rank: int, trace: Path | None):
        super().__init__(task, method, config, rank, trace)
        assert isinstance(self.gossip, gossamer.ElasticGossip)
        self._batches, self._grace = config.micro_batches, config.grace
        if threading.current_thread() is threading.main_thread():  # only that one may set handlers
            self.gossip.leave_on(signal.SIGTERM, grace=config.grace)

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of those that took part in the last meeting."""
        return 0 in self.gossip.participation().places

    @property
    def joined(self) -> bool:
        return self.gossip.joined

    @property
    def leaving(self) -> bool:
        return self.gossip.leaving

    def waits(self) -> dict[str, Any]:
        return {**super().waits(), "deadlines": self.gossip.stats()["deadline_seconds_by_peer"]}

    def consensus_distance(self) -> None:
        """Not measured: that would be a second meeting."""

    def pause(self, pause: Pause, stop: Stop, step: int) -> None:
        def together() -> None:
            pause.advance()
            pause.save()

        if pause.evaluates:
            pause.evaluate(together)
        else:
            with self.averaged():
                together()

    def advanced(self, step: int) -> int:
        self.gossip.catch_up()
        taken = self.gossip.steps[0]
        if taken != step:  # schedule and data go to the step of the state that this worker received
            self.replicas[0].go_to(taken, taken * self._batches)
        return taken

    def misses_meeting(self, meets: bool) -> bool:
        missed = self.gossip.acknowledge_join() and meets
        if missed:
            self.gossip.skip_meeting()
        return missed

    def needs_saving(self, step: int, *, began: int, saved: int) -> bool:
        return step > began  # members stop at different steps, and all of those that have trained must meet

    def make_stop(self, folder: Path) -> Stop:
        gossip = self.gossip
        return StopAlone(folder, self.places[0], lambda: gossip.leaving, lambda: gossip.stats()["members"], self._grace)

    def save(self, checkpoints: gossamer.Checkpoints, step: int | None, progress: dict[str, Any]) -> None:
        super().save(checkpoints, None, progress)  # members may be at different steps

    def finish(self, checkpoints: gossamer.Checkpoints) -> str:
        try:
            checkpoints.wait()
        except GossamerError as error:
            return str(error)  # the others may have written it: the launcher knows
        return ""


class VirtualStrategy(Strategy):
    """All workers in this process.

    Workers that average gradients exactly share a replica: all of them under DDP, the workers of a node with
    `exact_inside`; else every worker has its own.
    """

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
        self._workers = layout.n
        inside = (len(group) * reduced_bytes(replicas[0].model, len(group)) for group in groups)
        self._inside = sum(inside) / layout.n  # of one worker on average: nodes may differ
        self._reduced = reduced_bytes(replicas[0].model, len(groups)) if method.algorithm == "local" else None
        self.cluster: gossamer.VirtualCluster | None = None
        if method.algorithm != "ddp":
            per_node = [1] * len(groups) if config.exact_inside else config.per_node
            self.cluster = gossamer.VirtualCluster(per_node=per_node)
            models, optimizers = [r.model for r in replicas], [r.optimizer for r in replicas]
            gossips = self.cluster.decentralize(models, optimizers, **gossip_settings(method, config))
            for replica, gossip in zip(replicas, gossips, strict=True):
                replica.gossip = gossip
        super().__init__(replicas, range(len(groups)), len(groups), self.cluster)

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
        if self._reduced is not None:  # those of an all-reduce, by which diloco and localsgd average
            between = self._reduced * gossips[0].stats()["rounds"] * len(gossips) / self._workers
        return float(between + self._inside * self.replicas[0].scheduler.last_epoch)

    def _rank_of(self, peer: int) -> int:
        return self.replicas[peer].members[0]  # the cluster numbers replicas, which are nodes with `exact_inside`

    def make_stop(self, folder: Path) -> Stop:
        return StopHere()
