"""From flags and a configuration file to a checked `RunConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError
from gossamer.recipes.config import RunConfig, make_config, read_toml
from gossamer.recipes.options import TASK_OPTIONS, TASKS, options_type

if TYPE_CHECKING:
    from gossamer.engine.policies import Settings
    from gossamer.predict.methods import Method


def build_config(
    task: str | None,
    file: Path | None,
    given: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    **decided: Any,
) -> RunConfig:
    """Merge the command's `defaults`, a configuration file, the flags `given` and what the command has `decided`.

    Later ones override earlier ones; a flag or decision that is None is not set.

    A flag is a key of the configuration or an option of the task. If nothing sets `exact_inside`, it is chosen as
    `gradients="auto"` would choose.
    """
    values = {**(defaults or {}), **(read_toml(file) if file is not None else {})}
    if task is not None:
        values["task"] = task
    if "task" not in values:
        raise InputError(
            f"the task is missing; write for example gossamer train vision; the tasks are {', '.join(TASKS)}"
        )
    known = options_type(values["task"]).model_fields
    options = values.get("options", {})
    if not isinstance(options, dict):
        raise InputError(f"options must be a table of the task's keys, got {options!r}; write them below [options]")
    options = dict(options)
    for name, value in given.items():
        if value is None:
            continue
        if name in known:
            options[name] = value
        elif name in RunConfig.model_fields:
            values[name] = value
        else:
            raise InputError(_misplaced(name, values["task"], list(known)))
    if isinstance(values.get("betas"), str):
        values["betas"] = values["betas"].split(",")
    config = make_config({**values, "options": options, **{k: v for k, v in decided.items() if v is not None}})
    if config.exact_inside is None:
        config = config.model_copy(update={"exact_inside": _auto_exact_inside(config)})
    return config


def _auto_exact_inside(config: RunConfig) -> bool:
    """Return whether `gradients="auto"` would average the gradients of this run exactly inside each node."""
    from gossamer.engine.build import auto_between_nodes
    from gossamer.predict.methods import parse
    from gossamer.topology import Layout

    method = parse(config.method)
    if method.exact:
        return False
    topology, settings = _gossip(method, config)
    return auto_between_nodes(topology, settings, Layout.of(config.per_node)) is not None


def _gossip(method: Method, config: RunConfig) -> tuple[str, Settings]:
    """Return the topology of a run, and the settings of its gossip."""
    from gossamer.engine.policies import Settings
    from gossamer.recipes.methods import gossip_settings

    settings = gossip_settings(method, config)
    return settings.pop("topology"), Settings.of(**settings)


def _misplaced(name: str, task: str, known: list[str]) -> str:
    flag = f"--{name.replace('_', '-')}"
    others = [other for other, kind in TASK_OPTIONS.items() if name in kind.model_fields]
    takes = f"{task} takes {', '.join(known)}"
    if others:
        return f"{flag} is an option of {' and '.join(others)}, not of {task}; {takes}"
    return f"{task} has no option {flag}; {takes}"


def per_node_from(workers: int | None, virtual: int | None, per_node: str | None) -> tuple[int, ...] | None:
    """Return the number of workers on each node; None when no flag is given.

    Without `per_node`, nodes have 4, 2 or 1 workers: the largest number that gives two or more nodes.
    """
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


def check_method(config: RunConfig) -> None:
    """Refuse a method that cannot train as configured, before anything is written."""
    from gossamer.comm.torchft_peer import missing
    from gossamer.engine.build import refuse_unstable
    from gossamer.engine.policies import Synchronous
    from gossamer.predict.methods import parse
    from gossamer.recipes.methods import refuse_unfit
    from gossamer.topology import Layout, resolve
    from gossamer.topology.schedule import Schedule

    method = parse(config.method)
    refuse_unfit(method, config)
    if method.algorithm == "ddp":
        return
    if method.algorithm == "local" and not config.virtual and (why := missing()) is not None:
        raise InputError(f"{method.name} on processes is torchft's own code, and {why}; or train it with --virtual")
    topology, settings = _gossip(method, config)
    policy = settings.algorithm
    if config.exact_inside and method.asynchronous and not config.virtual:
        raise InputError(
            f"exact_inside gives the workers of a node one replica, and {method.name} needs one per worker; leave it "
            "out, or choose a synchronous method, e.g. dadam:aer"
        )
    made = resolve(topology, Layout.of([1] * len(config.per_node) if config.exact_inside else config.per_node))
    if isinstance(policy, Synchronous):
        refuse_unstable(policy, Schedule(made, average_every=policy.average_every // policy.every))
