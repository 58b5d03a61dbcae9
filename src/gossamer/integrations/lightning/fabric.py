"""The strategy for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer import Gossip, InputError
from gossamer.checkpoint.state import random_state, set_random_state, snapshot
from gossamer.integrations._settings import refuse_wrapped
from gossamer.integrations.lightning import files
from gossamer.integrations.lightning.options import FRAMEWORK, as_timedelta, checked


class FabricGossipStrategy(DDPStrategy):
    """Trains by gossip instead of DDP: `Fabric(strategy=FabricGossipStrategy(topology="aer"))`.

    `fabric.setup(model, optimizer)` starts gossip. `fabric.save` saves the mean of all workers, and `fabric.load`
    resumes every worker exactly. Evaluate inside `with fabric.strategy.gossip.averaged():`.

    Args: as those of `GossipStrategy`, with Fabric's `precision` instead of `precision_plugin`.
    """

    def __init__(
        self,
        topology: Any = "aer",
        *,
        timeout: float | timedelta = timedelta(minutes=30),
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Any,
    ) -> None:
        self._settings = checked(type(self).__name__, {**settings, "topology": topology, "timeout": timeout})
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=as_timedelta(timeout),
            start_method=start_method,
        )
        self._backward_sync_control = _NoSync(self.gossip_of)
        self._gossips: list[Gossip] = []

    @property
    def gossip(self) -> Gossip:
        """The handle of gossip of the model that was set up; `gossip_of(model)` if there are several."""
        if len(self._gossips) != 1:
            raise InputError(
                f"{len(self._gossips)} models gossip, and `gossip` needs exactly "
                "one; call fabric.setup(model, optimizer) before and close() after, or gossip_of(model) for one of "
                "several"
            )
        return self._gossips[0]

    def gossip_of(self, module: nn.Module) -> Gossip:
        """The handle of gossip of a model that was set up together with its optimizers."""
        own = getattr(module, "module", module)  # `fabric.setup` returns a wrapper
        for gossip in self._gossips:
            if gossip.model in (module, own):
                return gossip
        raise InputError(
            f"this {type(module).__name__} was not set up together with its optimizers, so it does not gossip; call "
            "fabric.setup(model, optimizer)"
        )

    # -- start ------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # no wrapper
        """Leave the module as it is: gossip starts when it is set up together with its optimizers."""
        refuse_wrapped(FRAMEWORK, module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer without its module."""
        raise InputError(
            f"{type(self).__name__} sets up a model and its optimizers together; call fabric.setup(model, optimizer) "
            "instead of setup_module() and setup_optimizers()"
        )

    def setup_module_and_optimizers(  # older releases of Lightning pass no scheduler
        self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Start gossip. Collective."""
        gossip = gossamer.decentralize(self.setup_module(module), optimizers, **self._settings)
        self._gossips.append(gossip)
        gossip.on_stop(partial(self._gossips.remove, gossip))
        return module, optimizers, *scheduler

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip as DDP would at `max_norm`, by `Gossip.clip_grad_norm_`; other norms than 2 clip the own gradient."""
        if norm_type != 2:
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return self.gossip_of(module).clip_grad_norm_(max_norm, parameters, error_if_nonfinite=error_if_nonfinite)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _gossips_in(self, state: Any) -> dict[str, Gossip]:
        """The handles of the modules in `state`, by their keys."""
        held = {id(gossip.model): gossip for gossip in self._gossips}
        return {k: held[id(v)] for k, v in state.items() if id(v) in held} if isinstance(state, dict) else {}

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state as it is now, copied."""
        return deepcopy(super().get_module_state_dict(module))

    def save_checkpoint(
        self,
        path: files.AnyPath,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the mean of all workers in `path`, and beside it what each worker needs for an exact resume.

        Collective.
        """
        gossips = self._gossips_in(state)
        if not gossips:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        for gossip in gossips.values():
            files.refuse_in_average(gossip)
        handles = {key: snapshot(gossip.state_dict()) for key, gossip in gossips.items()}
        own = self._convert_stateful_objects_in_state(state, filter or {})
        own[files.KEY] = {"gossip": handles, "random": random_state()}
        with ExitStack() as blocks:
            for gossip in gossips.values():
                blocks.enter_context(gossip.averaged())
            plain = self._convert_stateful_objects_in_state(state, filter or {})
        files.save(self.checkpoint_io, next(iter(gossips.values())), path, plain, own, storage_options)

    def load_checkpoint(  # type: ignore[override]  # older releases of Lightning have no weights_only
        self, path: files.AnyPath, state: Any = None, strict: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Load this worker's own file into `state` if it holds a model that gossips; else the plain file."""
        gossips, own = self._gossips_in(state), None
        if gossips:
            plain = self.checkpoint_io.load_checkpoint(path, **options)
            own = files.own_file(path, plain, self.global_rank, self.world_size, self.reduce_boolean_decision)
        rest = super().load_checkpoint(path if own is None else own, state, strict, **options)
        saved = rest.pop(files.KEY, {})
        for key, gossip in gossips.items():
            handle = saved.get("gossip", {}).get(key)
            if handle is not None and gossip.accepts(handle):
                gossip.load_state_dict(handle)
            else:
                gossip.reset()
        if "random" in saved:
            set_random_state(saved["random"])
        return rest


class _NoSync(_BackwardSyncControl):
    """Gossip averages no gradients between replicas; inside a node it does with `gradients="node"`."""

    def __init__(self, gossip_of: Callable[[nn.Module], Gossip]):
        self._gossip_of = gossip_of

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A block in which gradients are not averaged inside the node."""
        return self._gossip_of(module).no_sync() if enabled else nullcontext()
