"""The `gossamer` program: it finds commands by name and turns errors into one sentence and exit code 2."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gossamer
from gossamer.errors import GossamerError

# Depending on its version typer vendors click or imports it; its public exception leads to either.
ClickError: type[Any] = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """The commands are the modules that `gossamer.cli.COMMANDS` names, imported on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        from gossamer.cli import COMMANDS

        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"gossamer.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gossamer {gossamer.__version__}")
        raise typer.Exit()


app = typer.Typer(
    cls=LazyGroup,
    add_completion=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: gossamer topology show aer --nodes 4 --per-node 4",
)


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Decentralized (gossip) data-parallel training for PyTorch."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; see `gossamer.cli.main`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = typer.main.get_command(app).main(arguments, prog_name="gossamer", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except GossamerError as error:
        return _fail(str(error))
    except ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group called without a command
            error.show()
            return int(error.exit_code)
        where = error.ctx.command_path if getattr(error, "ctx", None) else "gossamer"
        return _fail(f"{_described(error)}; see '{where} --help'")
    except typer.Abort:
        return 130
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _described(error: Any) -> str:
    """Return what is wrong with the arguments; for an unknown option with the most similar one."""
    if type(error).__name__ != "NoSuchOption":
        return _with_nearest_command(str(error.format_message()).rstrip("."))
    params = error.ctx.command.params if getattr(error, "ctx", None) else []
    known = [name for param in params for name in param.opts if name.startswith("-")]
    close = difflib.get_close_matches(error.option_name, known, 1, cutoff=0.75)
    return f"there is no option {error.option_name}" + (f" (did you mean {close[0]}?)" if close else "")


def _with_nearest_command(text: str) -> str:
    """Add the most similar command to a sentence about an unknown one."""
    from gossamer.cli import COMMANDS

    unknown = re.fullmatch(r"No such command '(.*)'", text)
    close = difflib.get_close_matches(unknown[1], COMMANDS, 1) if unknown else []
    return f"{text} (did you mean {close[0]}?)" if close else text


def _fail(sentence: str) -> int:
    print(f"gossamer: error: {' '.join(sentence.split())}", file=sys.stderr)
    return 2
