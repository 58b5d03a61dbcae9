"""The options that `train` and `compare` share, and how they become a run's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from gossamer.cli.options import Json
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.recipes.config import RunConfig

# Flags that are not named are keys of the configuration or of the task's options.
EXTRA: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What the user wrote, in the order of `--help`; `extra` are the flags that have no field."""

    task: Annotated[str | None, typer.Argument(metavar="TASK", help="vision, translate or lm.", show_default=False)] = (
        None
    )
    steps: Annotated[int | None, typer.Option(metavar="K", help="Optimizer steps.")] = None
    workers: Annotated[int | None, typer.Option(metavar="N", help="Start N local workers (default 4).")] = None
    virtual: Annotated[
        int | None, typer.Option(metavar="N", help="N workers in one process, on a simulated clock.")
    ] = None
    per_node: Annotated[
        str | None, typer.Option(metavar="L", help="Workers on each node: 4, or 4,4,2 (default 4, 2 or 1).")
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="B", help="Samples in one worker's batch.")] = None
    data: Annotated[str | None, typer.Option(metavar="PATH", help="A real data set (default: the embedded one).")] = (
        None
    )
    partition: Annotated[str | None, typer.Option(metavar="P", help="iid, or dirichlet:0.1 (label-skewed).")] = None
    exact_inside: Annotated[
        bool | None, typer.Option("--exact-inside", help="Average gradients inside a node, gossip between nodes.")
    ] = None
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="The cluster whose time --virtual shows (default a40).")
    ] = None
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Shape the links between nodes, e.g. 20mbit (lab).")
    ] = None
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A .toml file; flags win.")] = None
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where results go (default runs/TASK-TIME).")] = None
    as_json: Json = False
    extra: tuple[str, ...] = ()

    def named(self) -> dict[str, Any]:
        """The flags that are keys of the configuration or of the task's options."""
        return {name: getattr(self, name) for name in ("steps", "batch", "data", "partition", "exact_inside")}

    def configured(self, **decided: Any) -> RunConfig:
        """File, then flags, then what the command has decided; what the engine would refuse is refused here."""
        workers = self.workers
        if workers is None and self.virtual is None and self.per_node is None and self.config is None:
            workers = 4
        places = per_node_from(workers, self.virtual, self.per_node)
        where = None if self.virtual is None and workers is None else self.virtual is not None
        forced = {"per_node": places, "virtual": where, **decided}
        made = build_config(self.task, self.config, self.named(), self.extra, **forced)
        check_method(made)
        if made.virtual and self.link is not None:
            raise InputError(
                "--link shapes the links of real workers; with --virtual describe the cluster by --cluster"
            )
        if not made.virtual and self.cluster is not None:
            raise InputError("--cluster supplies the clock of --virtual workers; real workers have their own")
        return made


def with_run_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command(flags, *, ...)` with the fields of `RunFlags` as parameters of its own, as typer wants to see them."""
    shared = [f for f in fields(RunFlags) if f.name != "extra"]

    def run(context: typer.Context, **values: Any) -> None:
        flags = {f.name: values.pop(f.name) for f in shared}
        command(RunFlags(**flags, extra=tuple(context.args)), **values)

    own = list(inspect.signature(command).parameters.values())[1:]
    hints = {**get_type_hints(RunFlags, include_extras=True), **get_type_hints(command, include_extras=True)}
    kind = inspect.Parameter.KEYWORD_ONLY
    task, *rest = [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in shared]
    mine = [p.replace(annotation=hints[p.name]) for p in own]
    parameters = [inspect.Parameter("context", kind, annotation=typer.Context), task, *mine, *rest]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def build_config(
    task: str | None, file: Path | None, flags: Mapping[str, Any], extra: Sequence[str], **forced: Any
) -> RunConfig:
    """File, then flags, then what the command decides. Flags may be keys of the configuration or of the task."""
    from gossamer.recipes.config import RunConfig, make_config, read_toml
    from gossamer.recipes.task import options_type

    values = read_toml(file) if file is not None else {}
    if task is not None:
        if task.startswith("-"):  # an option without a field, taken for the argument
            raise InputError(f"{task} comes before the task; write the task's name first, as in gossamer train vision")
        values["task"] = task
    if "task" not in values:
        raise InputError("which task? write for example gossamer train vision; the tasks are vision, translate, lm")
    known = options_type(values["task"]).model_fields
    options = values.get("options", {})
    if not isinstance(options, dict):
        raise InputError(f"options must be a table of the task's keys, got {options!r}; write them below [options]")
    options = dict(options)
    for key, value in {**{k: v for k, v in flags.items() if v is not None}, **_pairs(extra)}.items():
        name = key.replace("-", "_")
        if name in known:
            options[name] = value
        elif name in RunConfig.model_fields and name not in ("task", "options"):
            values[name] = value
        else:
            raise InputError(
                f"there is no option --{key}: task {values['task']!r} knows {', '.join(known)}; a run knows "
                f"{', '.join(f for f in RunConfig.model_fields if f not in ('task', 'options'))}"
            )
    for name in ("betas",):
        if isinstance(values.get(name), str):
            values[name] = values[name].split(",")
    return make_config({**values, "options": options, **{k: v for k, v in forced.items() if v is not None}})


def check_method(config: RunConfig) -> None:
    """Refuse a method that cannot train as configured, before anything is written."""
    from gossamer.engine.policies import Settings
    from gossamer.predict.methods import parse
    from gossamer.recipes.methods import gossip_settings, refuse_unfit
    from gossamer.topology import Layout, resolve

    method = parse(config.method)
    refuse_unfit(method, config)
    if method.algorithm == "ddp":
        return
    settings = gossip_settings(method, config)
    topology = settings.pop("topology")
    Settings(on_failure=config.on_failure, **settings)
    if config.exact_inside and method.asynchronous and not config.virtual:
        raise InputError(
            f"exact_inside gives a node's workers one replica, and {method.name} needs one a worker; leave it out, or "
            "choose a synchronous method, e.g. dadam:aer"
        )
    resolve(topology, Layout.of([1] * len(config.per_node) if config.exact_inside else config.per_node))


def _pairs(extra: Sequence[str]) -> dict[str, Any]:
    """`--key value`, `--key=value` and `--key` (true) as a dictionary."""
    found: dict[str, Any] = {}
    rest = list(extra)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise InputError(f"{word!r} is not an option; write --name value, and the task's name first")
        key, equals, value = word[2:].partition("=")
        if equals:
            found[key] = value
        elif rest and not rest[0].startswith("--"):
            found[key] = rest.pop(0)
        else:
            found[key] = True
    return found


def per_node_from(workers: int | None, virtual: int | None, per_node: str | None) -> tuple[int, ...] | None:
    """Workers on each node; None when no flag says anything. Left to us, nodes have 4 workers, or 2, or 1: so many
    that there are two nodes or more."""
    if workers is not None and virtual is not None:
        raise InputError("--workers starts processes and --virtual needs none; pass one of them")
    n = workers if workers is not None else virtual
    if n is not None and not 1 <= n <= 4096:
        flag = "--workers" if workers is not None else "--virtual"
        raise InputError(f"{flag} must be between 1 and 4096, got {n}; pass a positive whole number")
    if per_node is None:
        if n is None:
            return None
        size = next((s for s in (4, 2) if n % s == 0 and n > s), 1)
        return (size,) * (n // size)
    try:
        counts = [int(piece) for piece in per_node.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise InputError(f"--per-node must be a positive number or a comma list of them, got {per_node!r}; e.g. 4")
    if len(counts) == 1 and n is not None:
        if n % counts[0]:
            raise InputError(f"{n} workers cannot be put {counts[0]} on a node; choose --per-node that divides {n}")
        counts *= n // counts[0]
    if n is not None and sum(counts) != n:
        raise InputError(f"--per-node {per_node} makes {sum(counts)} workers, not {n}; pass one of the two")
    return tuple(counts)
