"""`gossamer train`: train a task on local workers, on virtual ones, or in a job that torchrun or Slurm started."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import Json, command_app
from gossamer.cli.output import print_json, print_rich
from gossamer.cli.training import (
    EXTRA,
    Batch,
    ClusterName,
    ConfigFile,
    Data,
    ExactInside,
    Link,
    Partition,
    PerNode,
    Steps,
    Task_,
    Virtual,
    Workers,
)
from gossamer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.loop import Row
    from gossamer.trace import Trace

app = command_app()

EXAMPLE = (
    "Examples: gossamer train vision --workers 4 --method accumadam:aer --steps 100 | gossamer train lm --virtual 8 "
    "--cluster a40 | torchrun --nproc-per-node 4 -m gossamer train lm --method dadam:ring --steps 50 | "
    "gossamer train --resume runs/x"
)


@app.command(epilog=EXAMPLE, context_settings=EXTRA)
def train(
    context: typer.Context,
    task: Task_ = None,
    method: Annotated[str | None, typer.Option(metavar="METHOD", help="NAME[:TOPOLOGY[:WIRE]].")] = None,
    steps: Steps = None,
    workers: Workers = None,
    virtual: Virtual = None,
    per_node: PerNode = None,
    lr: Annotated[float | None, typer.Option(metavar="LR", help="Peak learning rate.")] = None,
    batch: Batch = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data order and dropout.")] = None,
    data: Data = None,
    partition: Partition = None,
    exact_inside: ExactInside = None,
    cluster: ClusterName = None,
    link: Link = None,
    config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder (default runs/TASK-TIME).")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(metavar="K", help="Steps between checkpoints.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue this run.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files as well.")] = False,
    as_json: Json = False,
) -> None:
    """Train a task. Every other key of the configuration, and every option of the task, is a flag too."""
    from gossamer.cli.training import build_config, default_folder, per_node_from
    from gossamer.comm.world import launched

    flags = {"method": method, "steps": steps, "lr": lr, "batch": batch, "seed": seed, "data": data}
    flags |= {"partition": partition, "exact_inside": exact_inside, "checkpoint_every": checkpoint_every}
    if launched():
        if workers is not None or virtual is not None or link is not None:
            raise InputError("a launcher has started the workers; leave --workers, --virtual and --link out")
        _join(task, config, flags, context.args, out, resume, tensorboard, as_json)
        return
    if resume is not None:
        if task is not None or context.args or {k for k, v in flags.items() if v is not None} - {"steps"}:
            raise InputError(f"--resume {resume} goes on as the run was configured; pass at most --steps with it")
        made, folder = _resumed(resume, steps), resume
    else:
        if virtual is None and workers is None and per_node is None and config is None:
            workers = 4
        places = per_node_from(workers, virtual, per_node)
        where = None if virtual is None and workers is None else virtual is not None
        made = build_config(task, config, flags, context.args, per_node=places, virtual=where)
        folder = out or default_folder(made.task)
    outcome = _local(made, folder, resume is not None, cluster, link, tensorboard, as_json)
    _tell(outcome, folder, made, as_json)


def _local(
    config: RunConfig, folder: Path, resume: bool, cluster: str | None, link: str | None, board: bool, quiet: bool
) -> dict[str, Any]:
    from gossamer.cli.training import lab_for, make_task_for, run_pool, run_virtual
    from gossamer.recipes.run import read_config
    from gossamer.runtime.methods import parse

    method = parse(config.method)
    if config.virtual and link is not None:
        raise InputError("--link shapes the links of real workers; with --virtual describe the cluster by --cluster")
    if not config.virtual and cluster is not None:
        raise InputError("--cluster supplies the clock of --virtual workers; real workers have their own")
    task = make_task_for(config)
    clock = start(config, folder, task, cluster, link) if not resume else read_config(folder)[1]["clock"]
    watch, display = watchers(folder, config, str(method), task.unit, board, quiet)
    with display:
        if config.virtual:
            return run_virtual(config, task, folder, clock, resume, watch)
        with lab_for(config.per_node, clock.get("link")) as lab, lab.pool() as pool:
            return run_pool(pool, folder, resume, watch)


def start(config: RunConfig, folder: Path, task: Any, cluster: str | None, link: str | None) -> dict[str, Any]:
    """Make the run's folder; what its times mean."""
    from gossamer.cli.training import described_cluster, simulated
    from gossamer.lab import why_unavailable
    from gossamer.recipes.run import prepare
    from gossamer.report.record import command_line, environment
    from gossamer.runtime.methods import parse
    from gossamer.trace import write_chrome

    method = parse(config.method)
    clock: dict[str, Any] = {"kind": "measured", "link": link}
    if link is not None:
        clock["network"] = "paced" if why_unavailable() else "namespaces"
    trace: Trace | None = None
    if config.virtual:
        clock, trace = simulated(method, config, described_cluster(cluster or "a40", config.per_node))
    facts = {"method": str(method), "clock": clock, "command": command_line(), "environment": environment()}
    prepare(folder, config, method, task, facts)
    if trace is not None:
        write_chrome(trace, folder / "predicted.json")
    return clock


def watchers(
    folder: Path, config: RunConfig, label: str, unit: str, board: bool, quiet: bool
) -> tuple[Callable[[Row], None], Any]:
    from gossamer.cli.progress import Display, tensorboard

    display = Display(label, config.steps, unit, 1 if config.virtual else config.workers, quiet=quiet)
    if not board:
        return display, display
    write = tensorboard(folder)

    def both(row: Row) -> None:
        display(row)
        write(row)

    return both, display


def _resumed(folder: Path, steps: int | None) -> RunConfig:
    """The run's configuration, with a new end if one is given."""
    from gossamer.recipes.checkpoint import latest
    from gossamer.recipes.config import make_config
    from gossamer.recipes.run import read_config

    config, content = read_config(folder)
    at = latest(folder)
    if steps is not None:
        config = make_config({**config.model_dump(), "steps": steps})
        (folder / "config.json").write_text(
            json.dumps({**content, "config": config.model_dump(mode="json")}, indent=1) + "\n"
        )
    if at >= config.steps:
        raise InputError(f"{folder} has done all its {config.steps} steps; pass --steps with more to go on")
    return config


def _join(
    task: str | None,
    file: Path | None,
    flags: dict[str, Any],
    extra: list[str],
    out: Path | None,
    resume: Path | None,
    board: bool,
    quiet: bool,
) -> None:
    """One worker of a job that a launcher started. Worker 0 makes the folder, which all must see."""
    from gossamer.cli.training import build_config, interrupts, make_task_for, train_here
    from gossamer.comm.world import join_world, leave_world, wait_for_all, workers_per_node
    from gossamer.recipes import stop
    from gossamer.recipes.run import read_config

    rank, _ = join_world()
    places = workers_per_node()
    # without --out the same on every worker: from the launcher, not from a clock
    job = f"{task or 'job'}-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ['MASTER_PORT']}"
    folder = resume or out or Path("runs") / job
    if resume is None:
        config = build_config(task, file, flags, extra, per_node=places, virtual=False)
        made = make_task_for(config)  # on every worker: bad input ends all of them, and nobody waits
    if rank == 0:
        stop.clear(folder)
        if resume is None:
            start(config, folder, made, None, None)
        else:
            _resumed(folder, flags["steps"])
    wait_for_all()
    config, content = read_config(folder)
    watch, display = watchers(
        folder, config, content["method"], content["unit"], board and rank == 0, quiet or rank > 0
    )
    with display, interrupts(lambda: stop.request(folder), (signal.SIGINT, signal.SIGTERM)):
        outcome = train_here(folder, rank, resume is not None, watch if rank == 0 else None)
    leave_world()
    if rank == 0:
        _tell(outcome, folder, config, quiet)


def _tell(outcome: dict[str, Any], folder: Path, config: RunConfig, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), "method": config.method, **outcome})
    else:
        seconds = outcome["seconds"] / max(1, outcome["step"])
        values = "  ".join(f"{k} {v:.4g}" for k, v in outcome.get("averaged", {}).items())
        clock = "simulated " if config.virtual else ""
        print_rich(f"{folder}: {outcome['step']} steps, {seconds * 1e3:.1f} {clock}ms a step  {values}")
    if outcome["stopped"]:
        typer.echo(
            f"stopped after step {outcome['step']} of {config.steps}; go on with: gossamer train --resume {folder}",
            err=True,
        )
        raise typer.Exit(130)
    if not as_json:
        print_rich(f"look at it with: gossamer report {folder} --html report.html")
