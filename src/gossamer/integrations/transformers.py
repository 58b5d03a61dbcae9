"""Gossip in the Hugging Face Trainer: `GossipTrainer(topology="aer", model=model, args=args, ...)`.

A callback cannot do this, because the Trainer wraps the model in DDP before the first callback is called.
"""

from __future__ import annotations

import warnings
from typing import Any

from gossamer import GossamerError, GossamerWarning, Gossip, InputError
from gossamer.integrations._frameworks import require
from gossamer.integrations._settings import check_settings, split_settings
from gossamer.integrations.accelerate import GossipAccelerator

_transformers: Any = require("transformers")

# Methods of Trainer that are not documented and that GossipTrainer extends.
_EXTENDED = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")


class GossipTrainer(_transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains by gossip instead of DDP.

    Keyword arguments of `gossamer.decentralize` (`topology`, `algorithm`, `wire`, ...) configure gossip; all others go
    to `Trainer`. For another trainer class, inherit from both: `class Mine(GossipTrainer, Seq2SeqTrainer): pass`.

    Evaluation, prediction and saved models use the mean of all workers, and the model is the mean when `train()`
    returns. Every checkpoint also holds the exact state of every worker, from which training resumes.
    """

    accelerator: GossipAccelerator

    def __init__(self, *args: Any, **kwargs: Any):
        settings, others = split_settings(kwargs)
        check_settings("the Hugging Face Trainer", settings, steps_together=True)
        if missing := [name for name in _EXTENDED if not hasattr(_transformers.Trainer, name)]:
            raise GossamerError(
                f"transformers {_transformers.__version__} has no Trainer.{missing[0]}, which GossipTrainer extends to "
                "save and resume; install a release that was tested (see docs/integrations/transformers.md)"
            )
        self._gossip_settings = settings
        super().__init__(*args, **others)
        if self.args.n_gpu > 1:
            raise InputError(
                f"one process with {self.args.n_gpu} GPUs has nothing to gossip with; start one process per GPU, for "
                "example with torchrun --nproc-per-node"
            )
        # The local number of tokens instead: the global one needs all workers in every step, which gossip is to avoid.
        self.args.average_tokens_across_devices = False
        if self.args.include_num_input_tokens_seen not in ("no", False) and self.args.world_size > 1:
            warnings.warn(
                "include_num_input_tokens_seen gathers a number from all workers at every batch, so every step waits "
                "for the slowest worker; set it to 'no'",
                GossamerWarning,
                stacklevel=2,
            )
        self.callback_handler.callbacks.insert(0, _MeanAtEnd(self))  # the user's callbacks see the mean

    @property
    def gossip(self) -> Gossip | None:
        """The handle while `train()` runs; None before and after it, and in a single process."""
        return self.accelerator.gossip

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let it prepare models for gossip."""
        super().create_accelerator_and_postprocess()
        self.accelerator = GossipAccelerator.of(self.accelerator, self._gossip_settings)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`. If it raises on this worker, the others hear of it at once."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            self.accelerator.abandon_gossip(error)
            raise

    # -- the mean ---------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop` (of `evaluate` and `predict`) on the mean of all workers. Collective."""
        with self.accelerator.averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """`Trainer.save_model` with the mean of all workers. Collective while `train()` runs."""
        with self.accelerator.averaged():
            super().save_model(*args, **kwargs)

    def end_gossip(self) -> None:
        """Stop gossip; the model is the mean of all workers, or the best model if the Trainer has loaded it."""
        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None
        self.accelerator.close_gossip(average=not best)

    # -- resuming ---------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_workers(output_dir, self._extra())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.accelerator.load_workers(checkpoint, self._extra())

    def _extra(self) -> dict[str, Any]:
        """What may differ between workers besides model and optimizer: a step skipped by an overflow is local."""
        extra = {"scheduler": self.lr_scheduler}
        return extra if self.accelerator.scaler is None else {**extra, "scaler": self.accelerator.scaler}


class _MeanAtEnd(_transformers.TrainerCallback):  # type: ignore[misc]
    """Ends gossip after the last step, before the user's callbacks of `on_train_end`."""

    def __init__(self, trainer: GossipTrainer):
        self._trainer = trainer

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.end_gossip()
