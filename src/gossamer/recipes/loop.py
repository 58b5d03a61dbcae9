"""The training loop: one for every task, every method, real workers and virtual ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gossamer import GossamerError
from gossamer.recipes.config import RunConfig
from gossamer.recipes.graceful_stop import Stop, StopHere
from gossamer.recipes.gradients import Gradients
from gossamer.recipes.strategy import Strategy
from gossamer.recipes.task import Task

Row = dict[str, Any]
Clock = Callable[[int], float]


class Diverged(GossamerError):
    """The loss is no longer a finite number."""


@dataclass
class Progress:
    """How far a run is. Time counts training only, not evaluations and checkpoints."""

    step: int = 0
    seconds: float = 0.0
    units: int = 0
    bytes: float = 0.0
    waited: float = 0.0
    stopped: bool = False
    unsaved: str = ""  # why the last checkpoint could not be written
    evaluation: dict[str, Any] = field(default_factory=dict)  # the last one

    def state_dict(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("step", "seconds", "units", "bytes", "waited")}


def train(
    task: Task,
    crew: Strategy,
    config: RunConfig,
    gradients: Gradients,
    *,
    progress: Progress,
    log: Callable[[Row], None],
    save: Callable[[Progress], None],
    stop: Stop | StopHere,
    clock: Clock | None = None,
) -> Progress:
    """Train from `progress.step` to `config.steps`.

    `log` receives a row a step and a row an evaluation; `save` is called on every worker after the same step. With
    `clock(k)`, the simulated time after k steps, `seconds` are not measured.
    """
    sent_before = progress.bytes - crew.bytes_sent()  # before this process; some crews count by steps, resumed ones too
    saved = progress.step or -1  # what is saved need not be saved again
    begun = progress.step

    def together() -> None:
        """In a meeting where the job outlives its workers: go on where the furthest is, and save."""
        progress.step = crew.advanced(progress.step)
        save(progress)

    def pause(judge: bool, keep: bool, *, final: bool = False) -> None:
        """Evaluate, save. Where the job outlives its workers that is one meeting, and all save in each: whoever joins
        then misses the whole of it, or takes part in the whole of it."""
        nonlocal saved
        if not (judge or keep):
            return
        with stop.meeting(progress.step):
            evaluation = {}
            if judge:
                evaluation = evaluate(task, crew, final=final, inside=together if crew.survives else None)
            elif crew.survives:
                with crew.averaged():
                    together()
        if evaluation:
            log({"step": progress.step, "seconds": progress.seconds, **evaluation})
            progress.evaluation = evaluation
        if keep and not crew.survives:
            with stop.meeting(progress.step):
                save(progress)
        if keep or crew.survives:
            saved = progress.step

    def due(every: int) -> bool:
        return every > 0 and progress.step % every == 0

    def missed() -> bool:
        """Whether the others are about to meet, or have met, after the step whose state this worker was given."""
        meets = progress.step >= config.steps or due(config.eval_steps) or due(config.checkpoint_every)
        return crew.newcomer() and meets

    if missed():
        crew.skip_meeting()
    while progress.step < config.steps:
        if stop(progress.step):
            progress.stopped = True
            # where the job outlives its workers all who have trained meet, at whatever step each of them is
            pause(False, progress.step > (begun if crew.survives else saved))
            return progress
        idle = crew.seconds_waited()
        began = time.perf_counter()
        batches = [[[next(s) for _ in range(config.micro_batches)] for s in r.streams] for r in crew.replicas]
        rate = crew.replicas[0].scheduler.get_last_lr()[0]
        losses = gradients(crew.replicas, batches)
        for replica in crew.replicas:
            replica.step(config.clip)
        progress.step = crew.advanced(progress.step + 1)
        progress.seconds += time.perf_counter() - began
        if clock is not None:
            progress.seconds = clock(progress.step)
        progress.units += sum(task.size(b) for r in batches for own in r for b in own)
        progress.bytes = sent_before + crew.bytes_sent()
        if idle is not None:
            progress.waited += (crew.seconds_waited() or 0.0) - idle
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} after step {progress.step} at learning rate {rate:g}; lower --lr, or lengthen the "
                "warm-up"
            )
        row = progress.state_dict()
        log({**row, "loss": loss, "lr": rate, "waited": None if idle is None else progress.waited})
        if missed():
            crew.skip_meeting()
            continue
        last = progress.step >= config.steps
        keep = due(config.checkpoint_every) or (last and config.save_final)
        pause(last or due(config.eval_steps), keep, final=last)
    stop.done(config.steps)
    return progress


def evaluate(
    task: Task, crew: Strategy, *, final: bool = False, inside: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The consensus model's quality and worker 0's own. Called by every worker; the first process measures, the others
    go on with their next step. `inside` is called while the parameters are the mean."""
    found: dict[str, Any] = {"consensus_distance": crew.consensus_distance(), "final": final}
    with crew.averaged() as model:
        if inside is not None:
            inside()
        if crew.leads:
            found["averaged"] = task.evaluate(model, final=final)
    if not crew.leads:
        return {}
    alone = crew.lockstep or crew.total == 1
    own = crew.replicas[0]
    found["local"] = found["averaged"] if alone else task.evaluate(own.model, final=final)
    if own.ema is not None:
        found["ema"] = task.evaluate(own.ema.module, final=final)
    return found
