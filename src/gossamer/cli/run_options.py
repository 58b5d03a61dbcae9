"""The options that `train` and `compare` share, generated from the configuration of a run and of its task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from gossamer.errors import InputError
from gossamer.recipes.config import RunConfig
from gossamer.recipes.options import TASK_OPTIONS

WORKERS = "Workers and links"
OUTPUT = "Output"
PANELS: dict[str, tuple[str, ...]] = {
    "Method": (
        *("method", "steps", "seed", "combine", "every", "outer", "outer_lr", "outer_momentum"),
        *("staleness", "average_every", "fragments", "exact_inside"),
        "ddp_bucket_mb",
    ),
    "Optimization": (
        *(
            "lr",
            "schedule",
            "warmup",
            "optimizer",
            "betas",
            "eps",
            "momentum",
            "weight_decay",
            "accumulate",
            "betas_per",
        ),
        "discount",
        *("micro_batches", "clip", "amp", "ema"),
    ),
    WORKERS: ("batched", "threads"),
    "Failures and checkpoints": (
        *("on_failure", "max_replacements", "soft_deadline", "hard_deadline", "grace"),
        *("checkpoint_every", "save_final", "keep_last"),
    ),
    OUTPUT: ("eval_every", "trace"),
}
"""The panel of each field of `RunConfig` in `--help`."""
BY_HAND = ("task", "options", "per_node", "virtual")  # fields of `RunConfig` whose flags `RunFlags` writes out
METAVARS = {"method": "METHOD", "betas": "B1,B2", "data": "PATH", "partition": "HOW"}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags that `train` and `compare` share."""

    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help=f"{', '.join(TASK_OPTIONS)}.", show_default=False)
    ] = None
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Start N local workers. Default: 4.", rich_help_panel=WORKERS)
    ] = None
    virtual: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train N workers in one process, on a simulated clock.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    per_node: Annotated[
        str | None,
        typer.Option(
            metavar="L",
            help="Workers on each node: 4, or 4,4,2. By default 4, 2 or 1, so that there are two or more nodes.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The cluster whose step times --virtual simulates. Default: a40.",
            rich_help_panel=WORKERS,
        ),
    ] = None
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Shape the links between nodes of local workers, e.g. 20mbit.", rich_help_panel=WORKERS
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="A TOML file with the same keys; flags override it."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the results. Default: runs/TASK-TIME.", rich_help_panel=OUTPUT),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.", rich_help_panel=OUTPUT)] = False
    given: Mapping[str, Any] = field(default_factory=dict)
    """The flags that are keys of the configuration or options of the task, as far as the user has set them."""

    def configured(self, *, defaults: Mapping[str, Any] | None = None, **decided: Any) -> RunConfig:
        """Merge the command's defaults, the configuration file, the flags and the command's decisions, and check."""
        from gossamer.jobs.configure import build_config, check_method, per_node_from

        workers = self.workers
        if workers is None and self.virtual is None and self.per_node is None and self.config is None:
            workers = 4
        places = per_node_from(workers, self.virtual, self.per_node)
        where = None if self.virtual is None and workers is None else self.virtual is not None
        decided = {"per_node": places, "virtual": where, **decided}
        made = build_config(self.task, self.config, self.given, defaults=defaults, **decided)
        check_method(made)
        if made.virtual and self.link is not None:
            raise InputError(
                "--link shapes the links of real workers; with --virtual describe the cluster by --cluster"
            )
        if not made.virtual and self.cluster is not None:
            raise InputError("--cluster supplies the clock of --virtual workers; real workers have their own")
        return made


def with_run_flags(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `command(flags, *, ...)` the fields of `RunFlags` and one option per configuration field.

    A parameter that the command declares itself replaces the option of the same name; `without` names further fields
    that the command does not take.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [f for f in fields(RunFlags) if f.name != "given"]
        own = list(inspect.signature(command).parameters.values())[1:]
        names = {p.name for p in own} | set(without)
        generated = [p for p in _generated() if p.name not in names]

        def run(**values: Any) -> None:
            flags = {f.name: values.pop(f.name) for f in shared}
            given = {p.name: v for p in generated if (v := values.pop(p.name)) is not None}
            command(RunFlags(**flags, given=given), **values)

        hints = {**get_type_hints(RunFlags, include_extras=True), **get_type_hints(command, include_extras=True)}
        kind = inspect.Parameter.KEYWORD_ONLY
        task, *rest = [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in shared]
        options = [*rest, *(p.replace(annotation=hints[p.name]) for p in own), *generated]
        parameters = [task, *sorted(options, key=_place)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _place(option: inspect.Parameter) -> int:
    """Return where the option's panel stands in `--help`: options without a panel first, the tasks' panels last."""
    panel = get_args(option.annotation)[-1].rich_help_panel
    panels = [None, *PANELS]
    return panels.index(panel) if panel in panels else len(panels)


def _generated() -> Iterator[inspect.Parameter]:
    """Yield one option per field of the run's configuration, then one per option of the tasks."""
    for panel, names in PANELS.items():
        for name in names:
            yield _option(name, RunConfig.model_fields[name], panel)
    found: dict[str, dict[str, FieldInfo]] = {}  # by option and task
    for task, kind in TASK_OPTIONS.items():
        for name, info in kind.model_fields.items():
            found.setdefault(name, {})[task] = info
    for name, by_task in sorted(found.items(), key=lambda item: -len(item[1])):
        yield _task_option(name, by_task)


def _option(name: str, info: FieldInfo, panel: str, text: str | None = None) -> inspect.Parameter:
    """Return the option of a field; `text` replaces its description and default."""
    kind, metavar = _type_of(info.annotation)
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        metavar=None if kind is bool else METAVARS.get(name, metavar),
        help=text or _sentence(info.description, _shown(info.default)),
        show_default=False,
        rich_help_panel=panel,
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _task_option(name: str, by_task: Mapping[str, FieldInfo]) -> inspect.Parameter:
    """Return one option for all tasks that have it, with the description and default of each where they differ."""
    infos = list(by_task.values())
    shared = len({str(i.annotation) for i in infos}) == 1
    panel = "Options of every task" if len(by_task) == len(TASK_OPTIONS) else f"Options of {' and '.join(by_task)}"
    if shared and len({i.description for i in infos}) == 1:
        defaults = {task: _shown(i.default) for task, i in by_task.items()}
        equal = len(set(defaults.values())) == 1
        default = next(iter(defaults.values())) if equal else ", ".join(f"{v} for {k}" for k, v in defaults.items())
        return _option(name, infos[0], panel, _sentence(infos[0].description, default))
    texts = []
    for task, info in by_task.items():
        metavar = _type_of(info.annotation)[1]
        choices = f" ({metavar})" if "|" in metavar else ""
        texts.append(f"{task}{choices}: {_sentence(info.description, _shown(info.default))}")
    return _option(name, infos[0] if shared else FieldInfo(annotation=str), panel, " ".join(texts))


def _sentence(description: str | None, default: str) -> str:
    return f"{description} Default: {default}." if default else str(description)


def _type_of(annotation: Any) -> tuple[type, str]:
    """Return the type that typer parses a field as, and its name in `--help`; the configuration checks the value."""
    if get_origin(annotation) is Annotated:
        return _type_of(get_args(annotation)[0])
    inner = [kind for kind in get_args(annotation) if kind is not NoneType]
    if len(inner) == 1 and len(get_args(annotation)) == 2:  # X | None
        return _type_of(inner[0])
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    names = {bool: "", int: "N", float: "X"}
    return (annotation, names[annotation]) if annotation in names else (str, "TEXT")


def _shown(default: Any) -> str:
    """Return how `--help` shows a default; nothing for None, which the description explains, and for false."""
    if default is None or default is False:
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return "on" if default is True else str(default)
