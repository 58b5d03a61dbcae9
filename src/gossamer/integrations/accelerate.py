"""Gossip in Hugging Face Accelerate: an `Accelerator` that prepares models for gossip instead of DDP.

accelerator = GossipAccelerator(topology="aer", mixed_precision="bf16")
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer import Checkpoints, GossamerWarning, Gossip, InputError
from gossamer.checkpoint.state import bare
from gossamer.integrations._frameworks import require
from gossamer.integrations._settings import check_settings, is_asynchronous, refuse_wrapped, split_settings

_accelerate: Any = require("accelerate")

FRAMEWORK = "Accelerate"
WORKERS = "gossamer"
"""The folder inside a checkpoint of Accelerate or transformers that holds the exact state of every worker."""


class GossipAccelerator(_accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` whose `prepare()` starts gossip instead of wrapping the model in DDP.

    Keyword arguments of `gossamer.decentralize` (`topology`, `algorithm`, `wire`, ...) configure gossip; all others go
    to `Accelerator`. The model stays a plain module. One model is trained, by one or several optimizers; models without
    an optimizer, such as a teacher, are prepared as for evaluation. In a single process nothing is exchanged.

    Collective, besides what is collective in Accelerate: `prepare` with an optimizer, `averaged`, `get_state_dict`,
    `save_model`, `save_state`, `load_state`, `free_memory`, `end_training`.
    """

    def __init__(self, **kwargs: Any):
        settings, others = split_settings(kwargs)
        check_settings(FRAMEWORK, settings, steps_together=False)
        super().__init__(**others)
        self._set_up(settings)

    @classmethod
    def of(cls, accelerator: Any, settings: dict[str, Any]) -> Self:
        """A `GossipAccelerator` with the configuration of an `Accelerator` that has prepared nothing yet."""
        own = cls.__new__(cls)
        own.__dict__.update(accelerator.__dict__)
        own._set_up(settings)
        return own

    def _set_up(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._gossip: Gossip | None = None
        self._mixing: list[Optimizer] = []  # the optimizers that were passed to decentralize()
        kind = self.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise InputError(
                f"gossip replaces DDP, but this Accelerator is configured for {kind}; configure it for plain "
                "multi-process training. To gossip between nodes that shard the model inside, call fully_shard() and "
                "gossamer.decentralize() yourself"
            )
        started = os.environ.get("WORLD_SIZE", "1")
        if self.num_processes == 1 and started != "1":
            raise InputError(
                f"WORLD_SIZE is {started}, but Accelerate runs as a single process, because it has found no GPU; on "
                "CPUs pass cpu=True to GossipAccelerator, or use_cpu=True to TrainingArguments"
            )
        if getattr(self, "parallelism_config", None) is not None:
            raise InputError(
                "gossip in Accelerate trains one whole replica per process, but this Accelerator has a "
                "parallelism_config; leave it out, or call gossamer.decentralize() with process_group= yourself"
            )

    # -- gossip -----------------------------------------------------------------------------------------------

    @property
    def gossip(self) -> Gossip | None:
        """The handle while there is one: after a model and its optimizer were prepared, and not in a single process."""
        return self._gossip

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all workers in the model, to evaluate or save it. Collective.

        Like `gossip.averaged()`, but may be nested, and does nothing where there is no gossip (a single process).
        """
        if self._gossip is None or self._gossip.in_meeting:
            yield
            return
        with self._gossip.averaged():
            yield

    def close_gossip(self, *, average: bool = True) -> None:
        """Stop gossip; every worker has the mean of all workers, or without `average` keeps its own. Collective."""
        if self._gossip is not None:
            self._gossip.close(average=average)

    def abandon_gossip(self, error: BaseException) -> None:
        """Stop gossip because this worker has failed: do not wait for the others, which hear of it at once. Local."""
        if self._gossip is not None:
            self._gossip.__exit__(type(error), error, error.__traceback__)

    def _ended(self) -> None:
        self._gossip = None

    # -- preparing --------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """`Accelerator.prepare` without DDP; starts gossip once the model and its optimizers are there. Collective."""
        prepared = super().prepare(*args, device_placement=device_placement)
        self._start()
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`Accelerator.prepare_model` without DDP: device placement, autocast and torch.compile."""
        refuse_wrapped(FRAMEWORK, model)
        prepared: nn.Module = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        return prepared

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_data_loader`; warns if worker 0 reads the data of all workers."""
        loader = super().prepare_data_loader(*args, **kwargs)
        if self.num_processes > 1 and isinstance(loader, _accelerate.data_loader.DataLoaderDispatcher):
            said = (
                "Accelerate's dispatch_batches is on (its default for an IterableDataset): worker 0 reads all batches "
                "and sends them, so in every step all workers wait for worker 0"
            )
            remedy = "pass DataLoaderConfiguration(dispatch_batches=False)"
            if is_asynchronous(self._settings):
                raise InputError(f"{said}, which an asynchronous algorithm must not; {remedy}, or use 'awc'")
            warnings.warn(f"{said}; {remedy}", GossamerWarning, stacklevel=3)
        return loader

    def _start(self) -> None:
        """Start gossip if a trainable model and its optimizers are prepared."""
        if self.num_processes == 1 or not self._optimizers:
            return
        if self._gossip is not None:
            if any(o not in self._mixing for o in self._optimizers):
                raise InputError(
                    "an optimizer was prepared after gossip had begun; pass the model and all of its optimizers to one "
                    "prepare() call"
                )
            return
        held = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        models = {id(m): m for m in map(bare, self._models)}
        trained = [m for m in models.values() if any(id(p) in held for p in m.parameters())]
        if len(trained) > 1:
            raise InputError(
                f"a GossipAccelerator trains one model, but the optimizers hold parameters of {len(trained)} prepared "
                "models; put the models into one nn.ModuleDict and prepare that"
            )
        if trained:
            self._gossip = gossamer.decentralize(trained[0], self._optimizers, **self._settings)
            self._mixing = list(self._optimizers)
            self._gossip.on_stop(self._ended)

    # -- training ---------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip this worker's gradients as all-reduce would at `max_norm`, by `Gossip.clip_grad_norm_`. Local.

        Norms other than the 2-norm clip the worker's own gradient as it is.
        """
        if self._gossip is None or norm_type != 2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        return self._gossip.clip_grad_norm_(max_norm, [parameters] if isinstance(parameters, Tensor) else parameters)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients without averaging them inside the node, where they are averaged there. Local."""
        if self._gossip is None:
            yield
            return
        with self._gossip.no_sync():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing but to override `even_batches`: workers with different numbers of batches do not hang. Local.

        Workers whose gradients are averaged inside their node need equal numbers; with `gradients="worker"` none does.
        """
        samplers = [s for s in (getattr(x, "batch_sampler", None) for x in self._dataloaders) if s is not None]
        changed = [s for s in samplers if even_batches is not None and hasattr(s, "even_batches")]
        before = [s.even_batches for s in changed]
        try:
            for sampler in changed:
                sampler.even_batches = even_batches
            yield
        finally:
            for sampler, value in zip(changed, before, strict=True):
                sampler.even_batches = value

    # -- saving and loading -----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A copy of the mean of all workers' models. Collective.

        `save_model()` and `save_state()` save it.
        """
        if self._gossip is None or bare(model) is not self._gossip.model:
            state: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return state
        with self.averaged():
            return deepcopy(super().get_state_dict(model, unwrap=unwrap))

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """`Accelerator.save_state` with the mean as the model, and the exact state of every worker. Collective."""
        with self.averaged():  # also for save_state hooks, which may save the models themselves
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        self.save_workers(folder, self._extra())
        return folder

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """`Accelerator.load_state`, then the exact state of every worker. Collective.

        A folder that was saved without gossip is loaded alike on every worker.
        """
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()
        self.load_workers(folders[0], self._extra())

    def save_workers(self, folder: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
        """Save the exact state of every worker to a folder inside `folder`, in place of what is there. Collective."""
        if self._gossip is None:
            return
        inside = Path(folder) / WORKERS
        if 0 in self._gossip.participation().places:
            shutil.rmtree(inside, ignore_errors=True)
        self._gossip.share("")  # nothing is written before the old state is gone
        checkpoints = Checkpoints(inside)
        checkpoints.save(self._gossip, self._gossip.model, self._mixing, extra=extra)
        checkpoints.wait()

    def load_workers(self, folder: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
        """Load what `save_workers` saved; without it continue from the parameters as they are. Collective."""
        if self._gossip is None:
            return
        inside = Path(folder) / WORKERS
        if inside.is_dir():
            Checkpoints(inside).load(self._gossip, self._gossip.model, self._mixing, extra=extra)
        else:
            self._gossip.reset()

    def _extra(self) -> dict[str, Any]:
        """What may differ between workers besides model and optimizers: a step skipped by an overflow is local."""
        extra = {f"scheduler {i}": scheduler for i, scheduler in enumerate(self._schedulers)}
        return extra if self.scaler is None else {**extra, "scaler": self.scaler}

    # -- the end ----------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """`Accelerator.free_memory`; first stops gossip and gives every worker's model the mean. Collective."""
        self.close_gossip()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """`Accelerator.end_training`; first stops gossip and gives every worker's model the mean. Collective."""
        self.close_gossip()
        super().end_training()
