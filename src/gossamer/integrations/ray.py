"""Elastic jobs on a Ray cluster: workers are actors, and dead workers are replaced while the others train.

Ray Train needs nothing of this module: in a `TorchTrainer`, `gossamer.decentralize` works as it does under torchrun.
But Ray Train ends all workers when one of them dies. `run_elastic` starts the workers as actors of their own instead,
hosts the directory of the job in the driver, and replaces actors that die.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gossamer import GossamerError, HostedDirectory, InputError
from gossamer.integrations._frameworks import require


@dataclass(frozen=True)
class Death:
    """A worker that died or raised, and why, in one line."""

    rank: int
    why: str


@dataclass(frozen=True)
class ElasticResult:
    """How an elastic job ended.

    Attributes:
        values: What `train` returned, by rank. A worker that was not replaced has none.
        deaths: The workers that died or raised, in this order.
    """

    values: dict[int, Any]
    deaths: list[Death]


def _to_stderr(text: str) -> None:
    print(f"gossamer: {text}", file=sys.stderr, flush=True)


def run_elastic(
    train: Callable[..., Any],
    *args: Any,
    workers: int,
    max_replacements: int = 3,
    actor_options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = _to_stderr,
) -> ElasticResult:
    """Call `train(*args)` on Ray actors as the workers of an elastic job, and replace actors that die.

    `train` calls `gossamer.decentralize(..., on_failure="continue")`, which finds the other workers by itself. RANK and
    WORLD_SIZE are in the environment. A replacement is the same call on a new actor: it takes the state of a member of
    the job, whose step count is `gossip.stats()["steps"]`, so start the data there.

    A worker that raises is replaced like one that dies, except for InputError, which ends the job. Without replacements
    left, or after a worker has returned, the others continue without the dead worker.

    Args:
        train: The function to call on every worker. Ray pickles it.
        args: Its arguments.
        workers: The number of workers.
        max_replacements: How many actors may be replaced in the job.
        actor_options: Options of Ray for every actor, such as `{"num_cpus": 4}`. Default: 1 CPU each.
        tell: Receives one line per death. Default: print it to standard error.

    Returns:
        The values that `train` returned, and the deaths.
    """
    _check(train, workers, max_replacements, actor_options)
    ray = _connected()
    address = ray.util.get_node_ip_address()
    directory = HostedDirectory(address=address, one_job=True)
    environment = {
        "WORLD_SIZE": str(workers),
        "GOSSAMER_DIRECTORY": f"{address}:{directory.port}",
        "GOSSAMER_TOKEN": os.environ.get("GOSSAMER_TOKEN") or secrets.token_hex(16),
    }
    actor = ray.remote(_Worker).options(**{"num_cpus": 1, **(actor_options or {})})
    job = _Job(ray, actor, environment, (train, args))
    try:
        for rank in range(workers):
            job.start(rank)
        return _watch_over(job, directory, max_replacements, tell)
    finally:
        job.close()
        directory.close()


class _Worker:
    """The actor: a process of its own, so what it writes to the environment ends with it."""

    def started(self) -> None:
        """Return as soon as Ray has found a place for this actor."""

    def run(self, environment: dict[str, str], call: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        import ray

        os.environ.update(environment)
        os.environ.setdefault("GOSSAMER_NODE", ray.get_runtime_context().get_node_id())
        train, args = call
        return train(*args)


class _Job:
    """The actors of a job, the latest of each rank, and the calls that have not ended.

    Args:
        ray: The module.
        actor: The class of the actors, with its options.
        environment: Variables that all workers get.
        call: The function and its arguments.
    """

    def __init__(
        self,
        ray: ModuleType,
        actor: Any,
        environment: dict[str, str],
        call: tuple[Callable[..., Any], tuple[Any, ...]],
    ):
        self._ray, self._actor, self._environment = ray, actor, environment
        self._call = ray.put(call)  # pickled once
        self._actors: dict[int, Any] = {}
        self._waiting: dict[int, Any] = {}  # replacements for which Ray may not have found a place yet
        self.running: dict[Any, int] = {}  # ranks, by the reference to the call's result

    def start(self, rank: int) -> None:
        """Start a worker, or a replacement of one that has ended."""
        replacement = rank in self._actors
        self._stop(rank)
        actor = self._actors[rank] = self._actor.remote()
        if replacement:
            self._waiting[rank] = actor.started.remote()
        self.running[actor.run.remote({**self._environment, "RANK": str(rank)}, self._call)] = rank

    def next_end(self) -> tuple[int, Any, Exception | None]:
        """Wait until a call ends; return its rank, and its value or its error."""
        (done,), _ = self._ray.wait(list(self.running), num_returns=1)
        rank = self.running.pop(done)
        try:
            return rank, self._ray.get(done), None
        except self._ray.exceptions.RayError as error:
            return rank, None, error

    def give_up_waiting(self) -> None:
        """The job is ending: end the replacements for which Ray has found no place, because they might never start."""
        for rank, started in self._waiting.items():
            if not self._ray.wait([started], timeout=0)[0]:
                self._stop(rank)
                self.running = {call: other for call, other in self.running.items() if other != rank}
        self._waiting.clear()

    def close(self) -> None:
        """End all actors."""
        for rank in list(self._actors):
            self._stop(rank)

    def _stop(self, rank: int) -> None:
        actor = self._actors.pop(rank, None)
        if actor is not None:
            self._ray.kill(actor)


def _watch_over(
    job: _Job, directory: HostedDirectory, max_replacements: int, tell: Callable[[str], None]
) -> ElasticResult:
    """Replace workers that die until none is running."""
    values: dict[int, Any] = {}
    deaths: list[Death] = []
    while job.running:
        rank, value, error = job.next_end()
        if error is None:
            values[rank] = value
            job.give_up_waiting()
            continue
        cause = getattr(error, "cause", None) or error  # what `train` raised, or how the actor died
        if isinstance(cause, InputError):
            raise cause from None  # a replacement would raise the same error
        why = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        deaths.append(Death(rank, why if cause is error else f"{type(cause).__name__}: {why}"))
        if values:
            then = "the job ends without it"
        elif len(deaths) <= max_replacements:
            job.start(rank)
            then = f"replaced ({len(deaths)} of at most {max_replacements})"
        elif job.running and directory.founded:
            then = f"the others continue without it: {max_replacements} were replaced already (max_replacements)"
        else:
            begun = "no worker is left" if directory.founded else "the workers had not met yet"
            raise GossamerError(
                f"worker {rank} is gone ({deaths[-1].why}) and is not replaced after {max_replacements} replacements; "
                f"{begun}, so the job ends"
            ) from error
        tell(f"worker {rank} is gone ({deaths[-1].why}); {then}")
    return ElasticResult(values, deaths)


def _connected() -> ModuleType:
    """Ray, connected to a cluster; like Ray's own libraries, start a local one if there is none."""
    ray = require("ray")
    if ray.util.client.ray.is_connected():
        raise InputError(
            "run_elastic hosts the directory of the job in this process, which workers cannot reach through Ray Client "
            "(ray://); run the program inside the cluster, for example with `ray job submit`"
        )
    if not ray.is_initialized():
        ray.init()
    return ray


def _check(
    train: Callable[..., Any], workers: int, max_replacements: int, actor_options: Mapping[str, Any] | None
) -> None:
    if not callable(train):
        raise InputError(f"train must be a function to call on every worker, got {type(train).__name__}")
    for name, value, least in (("workers", workers, 1), ("max_replacements", max_replacements, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
    refused = sorted({"max_restarts", "max_task_retries"} & set(actor_options or {}))
    if refused:
        raise InputError(
            f"actor_options cannot have {' and '.join(refused)}: Gossamer replaces dead actors itself; set "
            "max_replacements instead"
        )
