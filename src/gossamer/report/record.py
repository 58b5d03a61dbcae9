"""Records: the folder behind a performance claim, with command, machine, versions, raw samples and a summary."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from gossamer.errors import InputError

PACKAGES = ("gossamer", "torch", "numpy", "decent-dp")


def environment() -> dict[str, Any]:
    """Return the machine and the versions that a number depends on, without names or paths of this machine."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "versions": versions,
    }


def command_line() -> str:
    """Return the command of this process, without paths of this machine."""
    program = Path(sys.argv[0])
    name = "gossamer" if program.name in ("gossamer", "__main__.py") else f"python {program.parent.name}/{program.name}"
    return f"{name} {shlex.join(sys.argv[1:])}".strip()


def check_record_folder(folder: Path) -> None:
    """Raise `InputError` if a record cannot be written to the folder, or is there already."""
    if (folder / "record.json").exists():
        raise InputError(f"{folder} already holds a record; choose another --out, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the record's folder {folder}: {error.strerror}; choose another --out") from None
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write to the record's folder {folder}: Permission denied; choose another --out")


def write_record(
    folder: str | os.PathLike[str],
    *,
    data: Mapping[str, Any],
    summary: str,
    note: str = "",
    environment: Mapping[str, Any],
) -> Path:
    """Write `record.json` (all data with raw samples) and `README.md` (the summary for people)."""
    path = Path(folder)
    record = {
        "command": command_line(),
        "date": date.today().isoformat(),
        "note": note,
        "environment": dict(environment),
        **data,
    }
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "record.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        lines = [f"# {path.name}", "", f"    {record['command']}", ""]
        versions = environment["versions"]
        lines += [f"{environment['cpu']}, {environment['cores']} cores; torch {versions['torch']}. {note}".strip(), ""]
        (path / "README.md").write_text("\n".join(lines) + summary.rstrip() + "\n\nRaw samples: `record.json`.\n")
    except OSError as error:
        raise InputError(
            f"cannot write the record to {str(path)!r}: {error.strerror}; choose another folder"
        ) from error
    return path


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
