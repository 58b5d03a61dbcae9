"""`gossamer train`: train a task on local workers, on virtual ones, or in a job that torchrun or Slurm started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.options import command_app
from gossamer.cli.output import print_json, print_rich
from gossamer.cli.run_options import OUTPUT, RunFlags, with_run_flags
from gossamer.errors import GossamerError, InputError
from gossamer.jobs.progress import summary_writer

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig
    from gossamer.recipes.task import Task

app = command_app()

EXAMPLE = (
    "Examples: gossamer train vision --workers 4 --method accumadam:aer --steps 100 | gossamer train lm --virtual 8 "
    "--cluster a40 | torchrun --nproc-per-node 4 -m gossamer train lm --method dadam:ring --steps 50 | "
    "gossamer train --resume runs/x --workers 3"
)


@app.command(epilog=EXAMPLE)
@with_run_flags()
def train(
    flags: RunFlags,
    *,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Resume this run; --workers N changes the number of workers."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files as well.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Train a task on local workers, on virtual workers, or as a worker of a job that torchrun or Slurm started."""
    from gossamer.comm.world import launched
    from gossamer.jobs.local import default_folder, make_task_for

    if tensorboard:
        summary_writer()  # a missing package is an error before anything is started
    if resume is not None:
        _refuse_with_resume(resume, flags)
    if launched():
        if flags.workers is not None or flags.virtual is not None or flags.link is not None:
            raise InputError("a launcher has started the workers; leave --workers, --virtual and --link out")
        _join(flags, resume, tensorboard)
        return
    if resume is None:
        config = flags.configured()
        task = make_task_for(config)
    else:
        config, task = _resumed(resume, flags)
    folder = resume or flags.out or default_folder(config.task)
    outcome = _local(config, task, folder, resume is not None, flags, tensorboard)
    _tell(outcome, folder, config, flags.as_json)


def _refuse_with_resume(folder: Path, flags: RunFlags) -> None:
    named = {**flags.given, **{k: getattr(flags, k) for k in ("cluster", "link", "config", "out")}}
    unused = [f"--{k.replace('_', '-')}" for k, v in named.items() if v is not None and k != "steps"]
    if flags.task is not None:
        unused.append(flags.task)
    if unused:
        raise InputError(
            f"--resume {folder} goes on as the run was configured, without {', '.join(unused)}; pass at most --steps, "
            "and --workers (or --virtual) and --per-node for another size, with it"
        )


def _local(config: RunConfig, task: Task, folder: Path, resume: bool, flags: RunFlags, board: bool) -> dict[str, Any]:
    from gossamer.jobs.elastic import run_elastic
    from gossamer.jobs.local import lab_for, run_pool, run_virtual, start, stop_when_asked, watchers
    from gossamer.recipes.run import read_config

    clock: dict[str, Any] = (
        read_config(folder)[1]["clock"] if resume else start(config, folder, task, flags.cluster, flags.link)
    )
    watch, display = watchers(folder, config, config.method, task.unit, board, flags.as_json)
    with display:
        if config.virtual:
            with stop_when_asked() as stop:
                return run_virtual(config, task, folder, clock, resume, watch, stop)
        with lab_for(config.per_node, clock.get("link")) as lab:
            if config.on_failure == "continue":
                return run_elastic(lab, config, folder, resume, watch)
            with lab.pool() as pool:
                return run_pool(pool, folder, resume, watch)


def _resumed(folder: Path, flags: RunFlags, launched: tuple[int, ...] | None = None) -> tuple[RunConfig, Task]:
    """The run's configuration, with a new end and other workers if they are given (or as they were launched), and its
    task. What cannot be trained is refused before the run's file is changed."""
    from gossamer.checkpoint.files import latest_in
    from gossamer.jobs.clock import simulated_on
    from gossamer.jobs.configure import check_method, per_node_from
    from gossamer.jobs.local import make_task_for
    from gossamer.recipes.config import make_config
    from gossamer.recipes.run import read_config, write_config

    before, content = read_config(folder)
    at = latest_in(folder / "checkpoints")
    if (flags.virtual if not before.virtual else flags.workers) is not None:
        wrong, right = ("--workers", "--virtual") if before.virtual else ("--virtual", "--workers")
        raise InputError(f"{folder} is a run with {right[2:]}; resume it with {right} N, not with {wrong}")
    places = launched or per_node_from(flags.workers, flags.virtual, flags.per_node) or before.per_node
    steps = flags.given.get("steps", before.steps)
    config = make_config({**before.model_dump(), "steps": steps, "per_node": places})
    if at >= config.steps:
        raise InputError(f"{folder} has done all its {config.steps} steps; pass --steps with more to go on")
    check_method(config)
    task = make_task_for(config)
    if config != before:
        if config.virtual and config.per_node != before.per_node:
            clock = content["clock"]
            content["clock"], _ = simulated_on(clock.get("description") or clock["cluster"], config)
        resumed = [*content.get("resumed", []), {"step": at, "workers_before": before.workers}]
        write_config(folder, {**content, "config": config.model_dump(mode="json"), "resumed": resumed})
    return config, task


def _join(flags: RunFlags, resume: Path | None, board: bool) -> None:
    """One worker of a job that a launcher started. Worker 0 makes the folder, which all must see."""
    from gossamer.comm.world import join_world, leave_world, said_by_first, workers_per_node
    from gossamer.jobs.local import interrupts, make_task_for, start, train_here, watchers
    from gossamer.recipes import graceful_stop as stop
    from gossamer.recipes.run import read_config

    rank, _ = join_world()
    # without --out the same on every worker: from the launcher, not from a clock
    job = f"{flags.task or 'job'}-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ['MASTER_PORT']}"
    folder = resume or flags.out or Path("runs") / job
    places = workers_per_node()
    if resume is None:
        config = flags.configured(per_node=places, virtual=False)
        _refuse_launched(config)
        made = make_task_for(config)  # on every worker: bad input ends all of them, and nobody waits
    problem = ""
    if rank == 0:
        stop.clear(folder)
        try:
            if resume is None:
                start(config, folder, made, None, None)
            else:
                _refuse_launched(read_config(folder)[0])
                _resumed(folder, flags, places)
        except GossamerError as error:
            problem = str(error)
    if problem := said_by_first(problem):
        raise InputError(problem)
    config, content = read_config(folder)
    quiet = flags.as_json or rank > 0
    watch, display = watchers(folder, config, content["method"], content["unit"], board and rank == 0, quiet)
    with display, interrupts(lambda: stop.request(folder)):
        outcome = train_here(folder, rank, resume is not None, watch if rank == 0 else None)
    leave_world()
    if rank == 0:
        _tell(outcome, folder, config, flags.as_json)


def _refuse_launched(config: RunConfig) -> None:
    if config.on_failure == "continue":
        raise InputError(
            "--on-failure continue has its own launcher; start it without torchrun or srun (under which your own "
            'script may use decentralize(..., on_failure="continue"))'
        )


def _tell(outcome: dict[str, Any], folder: Path, config: RunConfig, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), "method": config.method, **outcome})
    else:
        seconds = outcome["seconds"] / max(1, outcome["step"])
        values = "  ".join(f"{k} {v:.4g}" for k, v in outcome.get("averaged", {}).items())
        clock = "simulated " if config.virtual else ""
        print_rich(f"{folder}: {outcome['step']} steps, {seconds * 1e3:.1f} {clock}ms a step  {values}")
    if outcome["stopped"]:
        how = f"go on with: gossamer train --resume {folder}"
        typer.echo(f"stopped after step {outcome['step']} of {config.steps}; {how}", err=True)
        raise typer.Exit(130)
    if not as_json:
        print_rich(f"look at it with: gossamer report {folder} --html report.html")
