"""The command line. One file a command, imported when it is called, so that `gossamer --help` needs no torch.

To add a command NAME: write `cli/NAME.py` with a module-level `app = command_app()` holding one command (or
several: then they are sub-commands), give each an `epilog` with an example, and add NAME to `COMMANDS`. Import
torch, scipy and the like inside the functions. Raise a `GossamerError` for anything the user can put right.
"""

from gossamer.cli.program import main

COMMANDS = (
    "topology",
    "simulate",
    "probe",
    "advise",
    "bench",
    "chaos",
    "trace",
    "train",
    "compare",
    "export",
    "directory",
    "report",
    "doctor",
)

__all__ = ["COMMANDS", "main"]
