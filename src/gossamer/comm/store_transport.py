"""What the transports of static jobs share: the job's store tells all workers about each other, and who was lost."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.pace import Pace
from gossamer.comm.process_groups import Store, StoreError, WorkerGroup, broadcast_from_first, share_texts, subgroup_of
from gossamer.comm.transport import Job, PeerError, Transport

FAILED = "failed"  # the key that names the first worker that said so itself


class StoreTransport(Transport):
    """A transport of workers that are fixed. Parameters on an `accelerator` are copied through the host."""

    def __init__(self, store: Store, workers: WorkerGroup, timeout: float, accelerator: Accelerator | None = None):
        self.rank, self.size, self._workers = workers.rank, workers.size, workers
        self._store, self._timeout, self.accelerator = store, timeout, accelerator
        self.pace = Pace.from_environment(workers.rank)  # None: links are not slowed down
        # A blocking get of the user's on the job's store would delay connecting, so the links use another client.
        self._edge_store = store.clone()  # type: ignore[attr-defined]

    def share(self, name: str, text: str) -> list[str]:
        return share_texts(self._store, self._workers, self._timeout, name, text)

    def broadcast(self, tensors: list[Tensor], among: tuple[tuple[int, ...], ...] | None = None) -> None:
        if among is None:
            broadcast_from_first(tensors, self._workers.group)
        else:
            ranks = self._workers.ranks
            broadcast_from_first(tensors, subgroup_of(tuple(tuple(ranks[w] for w in group) for group in among)))

    def first_lost(self, peer: int) -> int:
        """Report that this worker lost `peer`. Return the worker that the job lost first: the one that died, while
        others only followed it."""
        with suppress(Exception):  # the store may have died with the peer
            return int(self._edge_store.compare_set("lost", "", str(peer)).decode())
        return peer

    def lost(self) -> int | None:
        with suppress(StoreError):
            if self._edge_store.check(["lost"]):
                return int(self._edge_store.get("lost"))
        return None

    def fail(self) -> None:
        self.first_lost(self.rank)
        with suppress(Exception):  # the store may be gone
            self._edge_store.compare_set(FAILED, "", str(self.rank))

    def failed(self) -> int | None:
        """The first worker that said itself that it failed."""
        with suppress(StoreError):
            if self._edge_store.check([FAILED]):
                return int(self._edge_store.get(FAILED))
        return None

    def loss(self, peer: int, job: Job, reason: str) -> PeerError:
        """The error of a job that lost `peer`."""
        first = self.first_lost(peer)
        before = "" if first == peer else f"; the first to be lost in this job was worker {first}"
        return PeerError(
            f"worker {self.rank} lost worker {peer} in round {job.round}, bucket {job.bucket}: "
            f"{' '.join(reason.split())[:200]}{before}. Is worker {first} alive, and did it train as many "
            "steps? Restart the job from its last checkpoint, or train with on_failure='continue'."
        )

    def close(self) -> None:
        self._edge_store = None  # closes its socket now; this object may live until the garbage collector runs
