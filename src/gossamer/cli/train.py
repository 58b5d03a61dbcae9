"""`gossamer train`: train a task on local workers, on virtual workers, or in a job that a launcher started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import command_app, count_of, note_paced_links, print_json, print_rich
from gossamer.cli.run_options import OUTPUT, RunFlags, with_run_flags
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.jobs.serving import Serving
    from gossamer.recipes.config import RunConfig

app = command_app()

EXAMPLE = (
    "Examples: gossamer train vision --workers 4 --method gossipadam:aer --steps 100 | gossamer train lm --virtual 8 "
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
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Serve a live page of the run, for this machine.", rich_help_panel=OUTPUT),
    ] = False,
    watch_at: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS[:PORT]",
            help="Serve the live page here instead of 127.0.0.1; beyond this machine it asks for a token.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Train a task on local workers, on virtual workers, or as a worker of a job that a launcher started."""
    from gossamer.comm.launcher import launched
    from gossamer.jobs.progress import summary_writer
    from gossamer.jobs.serving import Serving

    if tensorboard:
        summary_writer()  # a missing package is an error before anything is started
    if resume is not None:
        _refuse_with_resume(resume, flags)
    served = Serving.of(watch, watch_at)
    if launched():
        _as_launched(flags, resume, tensorboard, served)
    else:
        _here(flags, resume, tensorboard, served)


def _here(flags: RunFlags, resume: Path | None, board: bool, served: Serving) -> None:
    from gossamer.jobs.local import train_locally
    from gossamer.jobs.prepare import checked_task, default_folder, prepare_folder, resume_folder
    from gossamer.jobs.progress import Display, tensorboard
    from gossamer.recipes.run import read_config

    if resume is None:
        config = flags.configured()
        task = checked_task(config)
        note_paced_links(flags.link)
        folder = flags.out or default_folder(config.task)
        clock = prepare_folder(config, folder, task, cluster=flags.cluster, link=flags.link)
    else:
        folder = resume
        config, task = resume_folder(
            folder,
            steps=flags.given.get("steps"),
            workers=flags.workers,
            virtual=flags.virtual,
            per_node=flags.per_node,
        )
        clock = read_config(folder)[1]["clock"]
    display = Display(config, task.unit, also=tensorboard(folder) if board else None, quiet=flags.as_json)
    with served.page(folder), display:
        outcome = train_locally(config, task, folder, clock, display, resume=resume is not None)
    _print(outcome, folder, config, flags.as_json)


def _as_launched(flags: RunFlags, resume: Path | None, board: bool, served: Serving) -> None:
    from gossamer.jobs.launched import train_launched

    if flags.workers is not None or flags.virtual is not None or flags.link is not None:
        raise InputError("a launcher has started the workers; leave --workers, --virtual and --link out")
    done = train_launched(
        lambda places: flags.configured(per_node=places, virtual=False),
        flags.out,
        resume=resume,
        steps=flags.given.get("steps"),
        board=board,
        quiet=flags.as_json,
        serving=served.page,
    )
    if done is not None:
        _print(*done, flags.as_json)


def _refuse_with_resume(folder: Path, flags: RunFlags) -> None:
    named = {**flags.given, **{k: getattr(flags, k) for k in ("cluster", "link", "config", "out")}}
    unused = [f"--{k.replace('_', '-')}" for k, v in named.items() if v is not None and k != "steps"]
    if flags.task is not None:
        unused.append(flags.task)
    if unused:
        raise InputError(
            f"--resume {folder} continues the run as it was configured, without {', '.join(unused)}; pass at most "
            "--steps with it, and --workers (or --virtual) and --per-node to change the number of workers"
        )


def _print(outcome: dict[str, Any], folder: Path, config: RunConfig, as_json: bool) -> None:
    from gossamer.jobs.progress import values
    from gossamer.report.held_up import held_up_in
    from gossamer.report.noise import noise_line
    from gossamer.report.runs import grouped, load_run

    run = load_run(folder)
    noise = noise_line(grouped([run])) if run.evaluations else None
    waits = [] if config.virtual else held_up_in(folder)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "method": config.method,
                **outcome,
                "noise": noise,
                "held_up": [w.to_dict() for w in waits],
            }
        )
    else:
        seconds = run.step_time if run.steps else 0.0  # the median, as in `gossamer report`
        clock = "simulated " if config.virtual else ""
        steps = count_of(outcome["step"], "step")
        print_rich(f"{folder}: {steps}, {seconds * 1e3:.1f} {clock}ms per step  {values(outcome)}")
        if noise is not None:
            print_rich(noise)
        for found in waits:
            print_rich(f"{found.sentence} {found.change}".strip())
    if outcome["stopped"]:
        how = f"resume with: gossamer train --resume {folder}"
        typer.echo(f"stopped after step {outcome['step']} of {config.steps}; {how}", err=True)
        raise typer.Exit(130)
    if not as_json:
        print_rich(f"see: gossamer report {folder} --html report.html")
