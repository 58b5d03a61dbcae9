"""The consensus model of a checkpoint: what `Gossip.averaged()` holds, computed from the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import InputError
from gossamer.checkpoint import files
from gossamer.checkpoint.state import State, kept_local, values_of


def consensus(folder: str | os.PathLike[str], step: int | None = None) -> tuple[files.Manifest, dict[str, Any]]:
    """Return a checkpoint's manifest and the mean model of its workers, as a plain state_dict.

    Mixed parameters and floating-point buffers are averaged (in double precision), integer buffers take the maximum;
    parameters that stay local, and buffers of a run with buffers="local", are worker 0's.
    """
    where = Path(folder)
    manifest = files.read_manifest(where, files.latest_in(where) if step is None else step)
    # Under DDP all workers hold the same replica, so any file will do.
    workers = range(manifest.workers if len(manifest.groups) > 1 else 1)
    first: State = {}
    totals: dict[str, Tensor] = {}
    local: set[str] = set()
    for worker in workers:
        state = files.read_part(where, manifest, worker)
        values = values_of(state)
        if worker == 0:
            first, local = values, kept_local(state)
        if values.keys() != first.keys():
            raise InputError(f"worker {worker} of the checkpoint holds another model than worker 0; there is no mean")
        for name, value in values.items():
            if isinstance(value, Tensor) and name not in local and not value.is_complex():
                totals[name] = value.double() if worker == 0 else _joined(totals[name], value)
    mean = {}
    for name, value in first.items():
        mean[name] = value
        if name in totals:
            total = totals[name] / len(workers) if value.is_floating_point() else totals[name]
            mean[name] = total.to(value.dtype)
    return manifest, mean


def _joined(total: Tensor, value: Tensor) -> Tensor:
    return total.add_(value) if value.is_floating_point() else torch.maximum(total, value.double())
