"""Checkpoints: a file a replica, written beside and renamed, and complete when all of them are there.

RUN/checkpoints/step-00000100/manifest.json     {"format": 1, "step": 100, "files": 4}
                              replica-00000.pt  tensors and plain numbers only
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gossamer import GossamerError, InputError

FORMAT = 1
KEEP = 2


def save(run: Path, step: int, place: int, total: int, state: dict[str, Any]) -> Path:
    """This replica's part of the checkpoint after `step` steps."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if place == 0:
        manifest = json.dumps({"format": FORMAT, "step": step, "files": total}).encode()
        _replace(folder / "manifest.json", lambda file: file.write(manifest))
    _replace(folder / f"replica-{place:05d}.pt", lambda file: torch.save(state, file))
    return folder


def prune(run: Path) -> None:
    """Keep the newest complete checkpoints only, and whatever is being written."""
    for old in complete(run)[:-KEEP]:
        shutil.rmtree(run / "checkpoints" / f"step-{old:08d}", ignore_errors=True)


def complete(run: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    found = []
    for manifest in sorted((run / "checkpoints").glob("step-*/manifest.json")):
        said = json.loads(manifest.read_text())
        if said["format"] != FORMAT:
            raise InputError(
                f"checkpoint {manifest.parent} has format {said['format']}, this version reads {FORMAT}; resume it "
                "with the version that wrote it"
            )
        if all((manifest.parent / f"replica-{i:05d}.pt").exists() for i in range(said["files"])):
            found.append(int(said["step"]))
    return found


def latest(run: Path) -> int:
    """The newest complete checkpoint's step."""
    found = complete(run)
    if not found:
        raise InputError(f"{run} holds no complete checkpoint; start anew, with --checkpoint-every to have some")
    return found[-1]


def load(run: Path, step: int, place: int) -> dict[str, Any]:
    path = run / "checkpoints" / f"step-{step:08d}" / f"replica-{place:05d}.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its reader met in a damaged file
        raise GossamerError(
            f"cannot read checkpoint {path}: {str(error).splitlines()[0]}; remove its folder to resume from the one "
            "before"
        ) from error
    return state


def _replace(path: Path, write: Callable[[Any], Any]) -> None:
    """All or nothing, even if the machine goes down in between."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
