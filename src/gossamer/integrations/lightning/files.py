"""The files of a Lightning checkpoint of workers that gossip.

    last.ckpt                                   a plain checkpoint: the mean of all workers, and worker 0's optimizer
    last.ckpt.workers/1f0c93aa/worker-00000.ckpt    a complete checkpoint of each worker, for an exact resume

The plain file names the folder of its workers. The folder is new at every save and the plain file is written after it,
so a save that is killed leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from gossamer import GossamerError, GossamerWarning, GossipHandle

KEY = "gossamer"  # in the plain file: where the workers' files are; in a worker's file: the state of gossip

AnyPath = str | Path
State = dict[str, Any]


def folder_of(path: AnyPath) -> str:
    """The folder with the workers' files of all saves to `path`."""
    return f"{path}.workers"


def refuse_in_average(gossip: GossipHandle) -> None:
    """Raise GossamerError inside an averaged() block, where the workers' own parameters are out of reach."""
    if gossip.in_meeting:
        raise GossamerError(
            "a checkpoint inside `with gossip.averaged()` cannot hold the workers' own parameters; leave the block "
            "first: the checkpoint holds the mean anyway"
        )


def save(io: CheckpointIO, gossip: GossipHandle, path: AnyPath, plain: State, own: State, options: Any) -> None:
    """Write `own` of every worker, and then worker 0's `plain`. Collective."""
    name = gossip.share(secrets.token_hex(4))[0]
    (worker,), workers = gossip.participation().places, gossip.participation().workers
    folder = f"{folder_of(path)}/{name}"
    problem = ""
    try:
        io.save_checkpoint(own, f"{folder}/worker-{worker:05d}.ckpt", storage_options=options)
    except Exception as error:  # the other workers must hear of it
        problem = f"{type(error).__name__}: {error}"
    for other, why in enumerate(gossip.share(problem)):
        if why:
            raise GossamerError(f"worker {other} could not write its part of the checkpoint {path}: {why}")
    if worker == 0:
        relative = f"{os.path.basename(folder_of(path))}/{name}"
        io.save_checkpoint({**plain, KEY: {"workers": workers, "folder": relative}}, path, storage_options=options)
        _remove_others(io, path, name)


def own_file(path: AnyPath, plain: State, worker: int, workers: int, all_have: Callable[[bool], bool]) -> str | None:
    """This worker's file of the checkpoint `path`; None, with a warning, if the workers cannot resume exactly.

    `all_have` returns whether all workers pass True. Collective.
    """
    if KEY not in plain:
        return None
    saved = plain[KEY]
    own = f"{os.path.dirname(path) or '.'}/{saved['folder']}/worker-{worker:05d}.ckpt"
    if saved["workers"] != workers:
        why = f"it was saved by {saved['workers']} workers and this job has {workers}"
    elif not all_have(bool(get_filesystem(own).exists(own))):
        why = f"the workers' own files, {saved['folder']} beside it, are missing"
    else:
        return own
    if worker == 0:
        warnings.warn(
            f"{path} is not resumed exactly, because {why}: every worker continues from the mean of the workers, with "
            "the optimizer state of worker 0",
            GossamerWarning,
            stacklevel=3,
        )
    return None


def remove(io: CheckpointIO, path: AnyPath) -> None:
    """Remove the workers' files of `path`."""
    io.remove_checkpoint(folder_of(path))


def _remove_others(io: CheckpointIO, path: AnyPath, name: str) -> None:
    """Remove the workers' files of earlier saves to `path`."""
    folder = folder_of(path)
    system = get_filesystem(folder)
    for found in system.ls(folder, detail=False) if system.exists(folder) else ():  # a CheckpointIO may write later
        if os.path.basename(found) != name:
            io.remove_checkpoint(f"{folder}/{os.path.basename(found)}")
