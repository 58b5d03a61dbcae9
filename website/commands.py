"""The reference of the command line, written from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from gossamer.cli import program

INTRODUCTION = """# Command line

This page is made from the code of the commands. `gossamer COMMAND --help` prints the same. Bad input is one sentence on
standard error and exit code 2; Ctrl-C is exit code 130. Every command that prints results takes `--json`.
"""


def page() -> str:
    """Return the page of all commands."""
    root = typer.main.get_command(program.app)
    return "\n\n".join([INTRODUCTION, *(_section(name, command) for name, command in _walk("gossamer", root))]) + "\n"


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, groups before their members."""
    yield name, command
    if hasattr(command, "list_commands"):
        context = command.context_class(command, info_name=name)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _walk(f"{name} {child}", found)


def _section(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *(piece for param in command.get_params(context) for piece in _usage(param))])
    parts = [f"{'##' if name.count(' ') < 2 else '###'} {name}", _text(command.help)]
    if not hasattr(command, "list_commands"):
        parts.append(f"```text\n{usage}\n```")
    for title, params in _panels(command.get_params(context)).items():
        rows = [_row(param, context) for param in params]
        head = [f"**{title}**", "", "| option | meaning | default |", "|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    if command.epilog:
        examples = re.sub(r"^Examples?: ", "", command.epilog).split(" | ")
        parts.append("```bash\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(parts)


def _usage(param: Any) -> list[str]:
    if param.param_type_name == "argument":
        shown = param.metavar or (param.name or "").upper()
        return [shown if param.required else f"[{shown}]"]
    return [f"{param.opts[0]} {param.metavar or ''}"] if param.required else []


def _panels(params: list[Any]) -> dict[str, list[Any]]:
    """Group the parameters as `--help` does."""
    panels: dict[str, list[Any]] = {}
    for param in params:
        if not getattr(param, "hidden", False) and param.name != "help":
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(param)
    return panels


def _row(param: Any, context: Any) -> str:
    record = param.get_help_record(context) or ("", "")
    names, meaning = re.sub(r" <\w+>$", "", record[0]), _text(record[1])
    default = re.search(r"\s*\[(?:default: (.*?)|(required))\]$", meaning)
    said = "" if default is None else default[2] or f"`{default[1]}`"
    return f"| `{_cell(names)}` | {_cell(meaning[: default.start()] if default else meaning)} | {_cell(said)} |"


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
