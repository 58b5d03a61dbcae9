"""Virtual runs for the quality records: one JSON file a run, so that a study that was stopped goes on where it was.

Everything is the recipes' own: strategy, loop, gradients, optimizers, gossip.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import gossamer
from gossamer.jobs.clock import described_cluster, simulated
from gossamer.predict.methods import parse
from gossamer.recipes.config import RunConfig, make_config
from gossamer.recipes.graceful_stop import StopHere
from gossamer.recipes.gradients import choose
from gossamer.recipes.loop import Diverged, Progress, train
from gossamer.recipes.run import make_strategy
from gossamer.recipes.task import make_task

POINTS = 60  # of a training curve
MOST_RATES = 6  # that a search tries


def _at(factor: Callable[[int], float]) -> Callable[[gossamer.Gossip, float], Tensor]:
    """Clip a worker's own gradient at `factor(replicas)` times the threshold of all-reduce."""
    return lambda gossip, norm: nn.utils.clip_grad_norm_(gossip.model.parameters(), norm * factor(gossip.replicas))


CLIPPING = {"threshold": _at(lambda replicas: 1.0), "√replicas": _at(lambda replicas: replicas**0.5)}


class OnceJudged:
    """A task whose whole final evaluation is made once, on the averaged model."""

    def __init__(self, task: Any, model: Any = None):
        self._task, self.model = task, model or task.model
        self._judged = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def evaluate(self, model: nn.Module, *, final: bool = False) -> dict[str, float]:
        whole = final and not self._judged
        self._judged = self._judged or final
        found: dict[str, float] = self._task.evaluate(model, final=whole)
        return found


def small_translate(task: Any) -> Any:
    """A transformer with one layer on either side, width 64."""
    from gossamer.recipes.data.text import PAD
    from gossamer.recipes.models.transformer import Transformer, TransformerSize
    from gossamer.recipes.task import seeded

    def model(seed: int) -> nn.Module:
        with seeded(seed):
            return Transformer(task._subwords.size, TransformerSize(1, 64, 4, 256), norm="pre", dropout=0.0, pad=PAD)

    return model


_tasks: dict[str, Any] = {}


def task_of(config: RunConfig) -> Any:
    """Data is read once a process."""
    key = json.dumps([config.task, config.options], sort_keys=True)
    if key not in _tasks:
        _tasks[key] = make_task(config.task, config.options)
    task = _tasks[key]
    return OnceJudged(task, small_translate(task) if config.task == "translate" else None)


def run_once(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Train as the configuration says, unless the file has it; what came out, {"diverged": why} included.

    `values` may hold a rule of CLIPPING, which then takes the place of `gossip.clip_grad_norm_`.
    """
    values = dict(values)
    rule = CLIPPING.get(values.pop("clipping", ""))
    config = make_config({"virtual": True, "batched": "on", **values})
    said = {k: v for k, v in config.model_dump(mode="json").items() if k in _SAID}
    said["exact_inside"] = bool(config.exact_inside)
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        differs = sorted(
            k for k in said if k in found["config"] and _less_data(found["config"][k]) != _less_data(said[k])
        )
        if differs:
            raise SystemExit(f"{file} is of a run with another {', '.join(differs)}; choose another folder by --runs")
        return found
    torch.set_num_threads(1)
    method, task = parse(config.method), task_of(config)
    clock, _ = simulated(method, config, described_cluster("a40", config.per_node))
    began = time.process_time()
    strategy = make_strategy(config, task, method, file.parent, 0, None)
    gradients, _ = choose(task, config, strategy.replicas)
    rows: list[dict[str, Any]] = []
    outcome: dict[str, Any] = {"step_seconds": clock["step_seconds"]}
    progress = Progress()
    try:
        clip = rule or gossamer.Gossip.clip_grad_norm_
        with patch.object(gossamer.Gossip, "clip_grad_norm_", clip):
            train(
                task,
                strategy,
                config,
                gradients,
                progress=progress,
                log=rows.append,
                save=lambda now: None,
                stop=StopHere(),
                clock=lambda steps: float(steps * clock["step_seconds"]),
            )
        last = progress.evaluation
        outcome |= {"final": last["averaged"], "local": last["local"], "spread": last["consensus_distance"]}
    except Diverged as error:
        outcome["diverged"] = str(error)
    outcome["evaluations"] = [
        [r["step"], round(r["averaged"]["loss"], 5), round(r["consensus_distance"], 6)] for r in rows if "averaged" in r
    ]
    noise = ("step", "noise_scale", "replica_batch", "global_batch")
    outcome["noise"] = [[r[key] for key in noise] for r in rows if "averaged" in r]
    outcome["curve"] = _curve([r["loss"] for r in rows if "lr" in r], config.steps)
    outcome["parameters"] = sum(p.numel() for p in strategy.replicas[0].model.parameters())
    outcome["bytes"], outcome["units"] = progress.bytes, progress.units  # sent by a worker, seen by all
    outcome["config"] = said
    outcome["cpu_seconds"] = round(time.process_time() - began, 1)
    strategy.close()
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps(outcome))
    half.rename(file)
    return outcome


def search_rates(run: Callable[[float], dict[str, Any] | None], rates: Sequence[float]) -> dict[float, dict[str, Any]]:
    """Runs by rate: those that are given, and further factors of two while the best one is at the edge."""
    tried: dict[float, dict[str, Any]] = {}
    wanted = list(rates)
    while wanted:
        for rate in wanted:
            made = run(rate)
            if made is None:  # --finished
                return tried
            tried[rate] = made
        best = min(tried, key=lambda rate: tried[rate].get("final", {"loss": math.inf})["loss"])
        beyond = {min(tried): best / 2, max(tried): best * 2}
        wanted = [beyond[best]] if best in beyond and len(tried) < MOST_RATES else []
    return tried


def unpack(record: Path | None, folder: Path) -> None:
    """Put the runs that a record has into `folder`, so that a study goes on where it was on another machine."""
    kept = record / "runs.jsonl" if record is not None else None
    if kept is None or not kept.exists():
        return
    for line in kept.read_text().splitlines():
        run = json.loads(line)
        file = folder / run.pop("file")
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(run))


def pack(folder: Path, record: Path) -> None:
    """Write all runs to a record, a line each."""
    record.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.rglob("*.json"))
    lines = [json.dumps({"file": str(f.relative_to(folder)), **json.loads(f.read_text())}) for f in files]
    (record / "runs.jsonl").write_text("\n".join([*lines, ""]))


_SAID = {"method", "seed", "lr", "steps", "per_node", "betas", "accumulate", "betas_per", "exact_inside"}
_SAID |= {"every", "fragments", "outer", "outer_lr", "outer_momentum"}
_SAID |= {"combine", "optimizer", "discount", "momentum", "average_every", "schedule", "warmup", "clip", "options"}


def _less_data(value: Any) -> Any:
    """Options without the place of their data."""
    return {k: v for k, v in value.items() if k != "data"} if isinstance(value, dict) else value


def _curve(losses: list[float], steps: int) -> list[list[float]]:
    """(step, mean training loss since the point before), at most POINTS of them."""
    size = max(1, math.ceil(steps / POINTS))
    starts = range(0, len(losses) - size + 1, size)
    return [[at + size, round(sum(losses[at : at + size]) / size, 5)] for at in starts]
