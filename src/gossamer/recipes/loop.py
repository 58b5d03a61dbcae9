"""The training loop: the same for every task, every method, real workers and virtual workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gossamer import GossamerError
from gossamer.recipes.config import RunConfig
from gossamer.recipes.graceful_stop import Stop
from gossamer.recipes.gradients import Gradients
from gossamer.recipes.noise import noise
from gossamer.recipes.strategy import Strategy
from gossamer.recipes.task import Task

OBSERVED_EVERY = 1.0  # seconds between rows that also say what each worker sent to whom

Row = dict[str, Any]
Clock = Callable[[int], float]


class Diverged(GossamerError):
    """The loss is no longer a finite number."""


@dataclass
class Progress:
    """How far a run is. Time covers training only, not evaluations and checkpoints."""

    step: int = 0
    seconds: float = 0.0
    units: int = 0
    bytes: float = 0.0
    waited: float = 0.0
    stopped: bool = False
    left: bool = False
    """This worker was asked to leave; the others continue without it."""
    unsaved: str = ""
    """Why the last checkpoint could not be written."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """The last evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {k: getattr(self, k) for k in ("step", "seconds", "units", "bytes", "waited")}

    def outcome(self) -> dict[str, Any]:
        """Return what the launcher of the run needs: the progress, why the run ended, and the last evaluation."""
        left = {"left": True} if self.left else {}
        return {**self.state_dict(), "stopped": self.stopped, **left, "unsaved": self.unsaved, **self.evaluation}


@dataclass
class EvaluateAndSave:
    """What all workers do together after a step, as `Strategy.pause` calls it."""

    task: Task
    strategy: Strategy
    progress: Progress
    log: Callable[[Row], None]
    saver: Callable[[Progress], None]
    evaluates: bool
    saves: bool
    worker_batch: float
    """Units (samples) of one worker in one step."""
    final: bool = False

    def evaluate(self, inside: Callable[[], None] | None = None) -> None:
        evaluation = evaluate(self.task, self.strategy, final=self.final, inside=inside)
        if evaluation:
            evaluation |= noise(self.strategy, self.worker_batch)
            self.log({"step": self.progress.step, "seconds": self.progress.seconds, **evaluation})
            self.progress.evaluation = evaluation

    def advance(self) -> None:
        self.progress.step = self.strategy.advanced(self.progress.step)

    def save(self) -> None:
        self.saver(self.progress)


def train(
    task: Task,
    strategy: Strategy,
    config: RunConfig,
    gradients: Gradients,
    *,
    progress: Progress,
    log: Callable[[Row], None],
    save: Callable[[Progress], None],
    stop: Stop,
    clock: Clock | None = None,
) -> Progress:
    """Train from `progress.step` to `config.steps`.

    `log` receives one row per step and one per evaluation; `save` is called on every worker after the same step.
    With `clock(k)`, the simulated time after k steps, `seconds` is not measured.
    """
    # Some strategies count by the steps of the whole run, others from the start of this process.
    sent_before = progress.bytes - strategy.bytes_sent()
    saved = progress.step or -1  # the step of the newest checkpoint
    began = progress.step
    units_before, taken = progress.units, 0
    observed = -math.inf  # the time at which the workers were last observed

    def pause(evaluates: bool, saves: bool, *, final: bool = False) -> None:
        nonlocal saved
        if evaluates or saves:
            batch = (progress.units - units_before) / max(1, taken) / sum(len(r.members) for r in strategy.replicas)
            work = EvaluateAndSave(task, strategy, progress, log, save, evaluates, saves, batch, final)
            strategy.pause(work, stop, progress.step)
            saved = progress.step if saves else saved

    def due(every: int) -> bool:
        return every > 0 and progress.step % every == 0

    def misses_meeting() -> bool:
        meets = progress.step >= config.steps or due(config.eval_steps) or due(config.checkpoint_every)
        return strategy.misses_meeting(meets)

    misses_meeting()
    while progress.step < config.steps:
        leaving = strategy.leaving  # before the stop, which waits until all members are asked to leave
        if stop(progress.step):
            progress.stopped = True
            pause(False, strategy.needs_saving(progress.step, began=began, saved=saved))
            return progress
        if leaving:
            progress.left = True
            return progress
        waited_before = strategy.seconds_waited()
        start = time.perf_counter()
        batches = [[[next(s) for _ in range(config.micro_batches)] for s in r.streams] for r in strategy.replicas]
        rate = strategy.replicas[0].scheduler.get_last_lr()[0]
        losses = gradients(strategy.replicas, batches)
        for replica in strategy.replicas:
            replica.step(config.clip)
        progress.step = strategy.advanced(progress.step + 1)
        progress.seconds += time.perf_counter() - start
        if clock is not None:
            progress.seconds = clock(progress.step)
        progress.units += sum(task.size(b) for r in batches for own in r for b in own)
        taken += 1
        progress.bytes = sent_before + strategy.bytes_sent()
        if waited_before is not None:
            progress.waited += (strategy.seconds_waited() or 0.0) - waited_before
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after step {progress.step} at learning rate {rate:g}; lower --lr, or lengthen the "
                "warm-up"
            )
        waited = None if waited_before is None else progress.waited
        row: Row = {**progress.state_dict(), "loss": loss, "lr": rate, "waited": waited}
        if time.monotonic() - observed >= OBSERVED_EVERY or progress.step >= config.steps:
            observed = time.monotonic()
            row["workers"] = strategy.observe(losses)
        log(row)
        if misses_meeting():
            continue
        last = progress.step >= config.steps
        saves = due(config.checkpoint_every) or (last and config.save_final)
        pause(last or due(config.eval_steps), saves, final=last)
    stop.done(config.steps)
    return progress


def evaluate(
    task: Task, strategy: Strategy, *, final: bool = False, inside: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Evaluate the averaged model and worker 0's own. Collective; returns {} on all processes but the first.

    The other processes continue with their next step meanwhile. `inside` is called while the parameters are the mean.
    """
    found: dict[str, Any] = {"consensus_distance": strategy.consensus_distance(), "final": final}
    with strategy.averaged() as model:
        if inside is not None:
            inside()
        if strategy.leads:
            found["averaged"] = task.evaluate(model, final=final)
    if not strategy.leads:
        return {}
    own = strategy.replicas[0]
    same = strategy.lockstep or strategy.total == 1
    found["local"] = found["averaged"] if same else task.evaluate(own.model, final=final)
    if own.ema is not None:
        found["ema"] = task.evaluate(own.ema.module, final=final)
    return found
