"""The command line: one file per command, imported when it is called, so that `gossamer --help` needs no torch.

To add a command NAME, write `cli/NAME.py` with a module-level `app = command_app()` that holds one command, or several
subcommands. Give each an `epilog` with an example, and add NAME to `COMMANDS`. Import torch, scipy and the like inside
the functions. Raise a `GossamerError` for anything that the user can correct.
"""

from collections.abc import Sequence

COMMANDS = (
    "topology",
    "simulate",
    "probe",
    "advise",
    "bench",
    "chaos",
    "trace",
    "train",
    "watch",
    "compare",
    "export",
    "directory",
    "report",
    "doctor",
)

__all__ = ["COMMANDS", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 success, 2 bad input, 130 interrupted."""
    # Imported here because every worker process imports the launcher's main script, and no worker needs typer.
    from gossamer.cli.program import run

    return run(argv)
