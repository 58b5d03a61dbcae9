"""The strategy for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

import gossamer
from gossamer import GossamerError, Gossip, InputError
from gossamer.checkpoint.state import random_state, set_random_state, snapshot
from gossamer.integrations._settings import refuse_wrapped
from gossamer.integrations.lightning import files
from gossamer.integrations.lightning.options import FRAMEWORK, as_timedelta, checked


class GossipStrategy(DDPStrategy):
    """Trains by gossip instead of DDP: `Trainer(strategy=GossipStrategy(topology="aer"))`.

    Validation and checkpoints use the mean of all workers, and the model holds the mean when `fit` returns. A
    checkpoint that was saved during `fit` resumes every worker exactly.

    Args:
        topology: Which workers average in which round; see `gossamer.decentralize`.
        timeout: How long a wait for a peer may take, also in Lightning's own barriers.
        settings: Further arguments of `gossamer.decentralize`: `algorithm`, `wire`, `gradients`, `guard` and so on.

    The other arguments are those of Lightning's DDPStrategy.
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
        precision_plugin: Precision | None = None,
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
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=as_timedelta(timeout),
            start_method=start_method,
        )
        self._gossip: Gossip | None = None
        self._fit = ExitStack()  # what ends with `fit`: gossip, and changes to objects of the Trainer
        self._validation = ExitStack()  # the averaged() block of a validation
        self._resumes_exactly = False  # the model was loaded from this worker's own file
        self._random: dict[str, Any] | None = None  # random numbers to restore when training begins

    @property
    def gossip(self) -> Gossip:
        """The handle of gossip, which exists while `Trainer.fit` runs."""
        if self._gossip is None:
            raise GossamerError(
                f"{type(self).__name__}.gossip exists only while Trainer.fit() runs; use it in hooks of the "
                "LightningModule or of a callback"
            )
        return self._gossip

    # -- start and end ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Move the model to its device and make the optimizers; then start gossip, if the Trainer fits."""
        assert self.lightning_module is not None
        refuse_wrapped(FRAMEWORK, self.lightning_module)
        if self._layer_sync is not None:
            raise InputError(
                "Trainer(sync_batchnorm=True) makes all workers wait for each other in every forward pass, which "
                "gossip avoids; leave it out: checkpoints and validation use the mean of the workers' statistics"
            )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._start(trainer, self.lightning_module)

    def configure_ddp(self) -> None:
        """Leave the model as it is: gossip needs no wrapper."""

    def _start(self, trainer: Trainer, model: LightningModule) -> None:
        begin_equal = not self._resumes_exactly
        self._gossip = gossamer.decentralize(model, self.optimizers, broadcast=begin_equal, **self._settings)
        self._resumes_exactly = False
        self._fit.enter_context(self._gossip)
        self._fit.callback(_clip_by(self._gossip, self.precision_plugin))
        self._fit.callback(_keep_signals_local(trainer))

    def on_exception(self, exception: BaseException) -> None:
        """Stop gossip at once, so that the other workers notice and end as well."""
        super().on_exception(exception)
        details = (type(exception), exception, exception.__traceback__)
        self._validation.__exit__(*details)
        self._fit.__exit__(*details)
        self._gossip = None

    def teardown(self) -> None:
        """End gossip with the mean of all workers in the model."""
        self._fit.close()  # before Lightning moves the model to the CPU
        self._gossip = None
        super().teardown()

    # -- training ---------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Continue with the random numbers of the checkpoint that was loaded, if there is one."""
        super().on_train_start()
        assert self.lightning_module is not None
        if self._random is not None and _draws_again(self.lightning_module.trainer):
            set_random_state(self._random)
        self._random = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Accumulate gradients without averaging them inside the node, which `gradients="node"` does."""
        with self.gossip.no_sync():
            yield

    def on_validation_start(self) -> None:
        """Validate the mean of all workers."""
        super().on_validation_start()
        if self._gossip is not None:
            self._validation.enter_context(self._gossip.averaged())

    def on_validation_end(self) -> None:
        """Return to this worker's own parameters."""
        super().on_validation_end()
        self._validation.close()

    # -- checkpoints ------------------------------------------------------------------------------------------

    @property
    def _failing(self) -> bool:
        """Whether this worker ends because of an exception, so that collective calls would wait for nothing."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The mean of all workers. Collective while `fit` runs."""
        if self._gossip is None or self._gossip.in_meeting or self._failing:
            return deepcopy(super().lightning_module_state_dict())
        with self._gossip.averaged():
            return deepcopy(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: files.AnyPath, storage_options: Any = None) -> None:
        """Save the mean of all workers in `filepath`, and beside it what each worker needs for an exact resume.

        Collective. A checkpoint with weights only, or one of a worker that is failing, is the plain file alone.
        """
        gossip = self._gossip
        if gossip is None or self._failing or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with self._own_parameters(gossip):
            own = {
                **checkpoint,
                "state_dict": self._own_state(checkpoint["state_dict"]),
                files.KEY: {"gossip": snapshot(gossip.state_dict()), "random": random_state()},
            }
        files.save(self.checkpoint_io, gossip, filepath, checkpoint, own, storage_options)

    def _own_state(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """This worker's own values of what `saved` has; hooks of the user may have removed or added entries."""
        assert self.lightning_module is not None
        own = deepcopy(self.lightning_module.state_dict())
        for name in own.keys() - saved.keys():
            del own[name]
        own.update((name, value) for name, value in saved.items() if name not in own)
        return own

    @contextmanager
    def _own_parameters(self, gossip: Gossip) -> Iterator[None]:
        """Leave the averaged() block of a validation, if there is one, for the duration of this block. Collective."""
        validating = gossip.in_meeting
        self._validation.close()
        files.refuse_in_average(gossip)  # a block of the user's
        yield
        if validating:
            self._validation.enter_context(gossip.averaged())

    def load_checkpoint(self, checkpoint_path: files.AnyPath, *args: Any, **options: Any) -> dict[str, Any]:
        """Load this worker's own file if the Trainer fits, so that it resumes exactly; else the plain file."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **options)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            own = files.own_file(
                checkpoint_path, checkpoint, self.global_rank, self.world_size, self.reduce_boolean_decision
            )
            if own is not None:
                checkpoint = super().load_checkpoint(own, *args, **options)
                self._resumes_exactly = True
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers, then gossip and the random numbers of this worker."""
        super().load_optimizer_state_dict(checkpoint)
        state = checkpoint.get(files.KEY, {})
        if "gossip" in state:
            if self.gossip.accepts(state["gossip"]):
                self.gossip.load_state_dict(state["gossip"])
            else:  # another topology or algorithm: every worker keeps its parameters
                self.gossip.reset()
            self._random = state["random"]
            set_random_state(self._random)

    def remove_checkpoint(self, filepath: files.AnyPath) -> None:
        """Remove the plain file and the workers' files."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            files.remove(self.checkpoint_io, filepath)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers, unless this one is failing."""
        if not self._failing:
            super().barrier(*args, **kwargs)


def _draws_again(trainer: Trainer) -> bool:
    """Whether the data loader has drawn a random number since the checkpoint was loaded that it does not count on.

    A data loader draws one when its iterator is made, which the Trainer does before training begins. An uninterrupted
    run does so after a checkpoint at the end of an epoch, but not in the middle of one. After a checkpoint of the
    validation at the end of an epoch, the Trainer makes the iterator twice.
    """
    loop = trainer.fit_loop
    ended = loop.epoch_loop.restarted_on_train_batch_end and loop.epoch_loop.batch_progress.is_last_batch
    return bool(loop.restarted_mid_epoch and not ended)


def _clip_by(gossip: gossamer.Gossip, plugin: Precision) -> Callable[[], None]:
    """Clip the norm of gradients by `gossip`; returns what undoes it.

    `Trainer(gradient_clip_val=...)` and `clip_gradients()` in manual optimization then mean the same as with DDP.
    """

    def clip(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        gossip.clip_grad_norm_(clip_val, plugin.main_params(optimizer))

    return _replaced(plugin, "clip_grad_by_norm", clip)


def _keep_signals_local(trainer: Trainer) -> Callable[[], None]:
    """Let every worker look at its own SIGTERM only; returns what undoes it.

    Lightning broadcasts before every batch whether worker 0 has received one, so all workers would wait for worker 0
    in every step. Launchers signal all workers, and a worker that ends alone makes its neighbors raise.
    """
    signals = trainer._signal_connector

    def note(signum: int, _: object) -> None:
        if not signals.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        signals.received_sigterm = True

    undo = ExitStack()
    undo.callback(_replaced(signals, "_sigterm_notifier_fn", note))
    undo.callback(_replaced(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None))
    return undo.close


def _replaced(owner: object, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; returns what undoes it."""
    setattr(owner, name, call)
    return lambda: delattr(owner, name)
