"""A checkpoint on disk: one file per worker and a manifest, in a folder that becomes visible by one rename.

FOLDER/step-00000100/manifest.json      {"format": 2, "step": 100, "groups": [[0], [1]], "files": [...]}
                     worker-00000.pt    tensors and plain values only
       .step-00000200/                  being written, or left behind by a killed run; never read
                      worker-00001.pt
                      worker-00001.json     receipt: size and checksum of a part that is on the disk

A visible folder is complete: parts, manifest and rename are each forced to the disk before the next. A checkpoint that
is removed is first made invisible by a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gossamer.errors import GossamerError, InputError

FORMAT = 3
MANIFEST = "manifest.json"
ABANDONED = "abandoned"
HELD = {"model", "optimizer", "gossip", "mixed", "random", "extra"}  # keys of a worker's state
_STEP = re.compile(r"step-(\d{8,12})")
_CHUNK = 2**20


@dataclass(frozen=True)
class Part:
    """The file of one worker; `steps` is the number of optimizer steps that the worker had taken."""

    bytes: int
    sha256: str
    steps: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. `groups` are the workers that hold the same parameters."""

    step: int
    groups: tuple[tuple[int, ...], ...]
    files: tuple[Part, ...]

    @property
    def workers(self) -> int:
        return len(self.files)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def part_name(worker: int) -> str:
    return f"worker-{worker:05d}.pt"


def partial_of(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is assembled."""
    return folder / f".{name_of(step)}"


# -- writing --------------------------------------------------------------------------------------------------------


def write_part(folder: Path, step: int, worker: int, state: dict[str, Any], steps: int, meeting: str = "") -> None:
    """Write the part of one worker, then its receipt. `meeting` identifies the workers that save together."""
    partial = partial_of(folder, step)
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / part_name(worker)
    with path.open("wb") as file:
        sink = _Sink(file)
        torch.save(state, sink)  # type: ignore[arg-type]
        if sink.error is not None:
            raise sink.error
        _force(file)
    receipt = Part(sink.bytes, sink.sha256.hexdigest(), steps)
    _replace(path.with_suffix(".json"), {"meeting": meeting, **asdict(receipt)})


def receipts(folder: Path, step: int, workers: int, meeting: str = "") -> dict[int, Part]:
    """Return the receipts that workers of this meeting have written so far."""
    found = {}
    for worker in range(workers):
        with suppress(FileNotFoundError):
            receipt = json.loads((partial_of(folder, step) / part_name(worker)).with_suffix(".json").read_text())
            if receipt.pop("meeting") == meeting:
                found[worker] = Part(**receipt)
    return found


def commit(folder: Path, step: int, groups: Sequence[Sequence[int]], parts: Sequence[Part]) -> None:
    """Make a checkpoint visible whose parts are all on the disk. Called by one worker.

    A visible checkpoint of the same step by more workers is not replaced.
    """
    partial, final = partial_of(folder, step), folder / name_of(step)
    if (there := _workers_of(folder, step)) > len(parts):
        raise GossamerError(f"there is a checkpoint of {there} workers, and this one has {len(parts)}")
    content = {
        "format": FORMAT,
        "step": step,
        "groups": [list(g) for g in groups],
        "files": [{"name": part_name(w), **asdict(p)} for w, p in enumerate(parts)],
    }
    _replace(partial / MANIFEST, content)
    for receipt in partial.glob("worker-*.json"):
        receipt.unlink()
    _force_folder(partial)
    if final.exists():
        _hide(final)
    os.rename(partial, final)
    _force_folder(folder)


def abandon(folder: Path, step: int, why: str, meeting: str = "") -> None:
    """Tell the other workers of the meeting that this checkpoint is abandoned, and free its space."""
    partial = partial_of(folder, step)
    with suppress(OSError):
        partial.mkdir(parents=True, exist_ok=True)
        for file in partial.iterdir():
            if file.suffix == ".pt":
                file.unlink(missing_ok=True)
        (partial / ABANDONED).write_text(f"{meeting}\n{why}")


def abandoned(folder: Path, step: int, meeting: str = "") -> str | None:
    """Return why a worker of the meeting abandoned this checkpoint, if one did."""
    try:
        said = (partial_of(folder, step) / ABANDONED).read_text()
    except OSError:
        return None
    whose, _, why = said.partition("\n")
    if not said:
        return "its disk is full"
    return why if whose == meeting else None


def sweep(folder: Path, before: int | None = None) -> None:
    """Remove incomplete checkpoints (of steps before `before`) and partly removed ones."""
    for left in folder.glob(".step-*"):
        found = _STEP.fullmatch(left.name[1:])
        if before is None or found is None or int(found[1]) < before:
            shutil.rmtree(left, ignore_errors=True)


def prune(folder: Path, keep_last: int | None) -> None:
    """Remove all but the newest `keep_last` checkpoints."""
    if keep_last is not None:
        for old in steps_in(folder)[:-keep_last]:
            with suppress(OSError):
                _hide(folder / name_of(old))


def _hide(checkpoint: Path) -> None:
    """Make a checkpoint invisible, then remove it."""
    gone = checkpoint.with_name(f".{checkpoint.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(checkpoint, gone)
    shutil.rmtree(gone, ignore_errors=True)


class _Sink:
    """A file that hashes what is written to it.

    After an error it accepts and drops the rest: torch's writer must not be interrupted within a file, because its
    destructor writes the rest and ends the process if that fails.
    """

    def __init__(self, file: BinaryIO):
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        self.sha256.update(data)
        self.bytes += size
        return size

    def flush(self) -> None:
        """Do nothing: the caller forces the file to the disk."""


def _replace(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(json.dumps(content, indent=1).encode())
        _force(file)
    os.replace(beside, path)


def _force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _force_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading --------------------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, oldest first."""
    found = [(_STEP.fullmatch(p.parent.name), p) for p in folder.glob(f"step-*/{MANIFEST}")]
    return sorted(int(match[1]) for match, _ in found if match)


def latest_in(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; raise `InputError` if there is none."""
    found = steps_in(folder)
    if not found:
        raise InputError(
            f"{folder} holds no complete checkpoint; save one first (gossamer train: --save-final, --checkpoint-every)"
        )
    return found[-1]


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read and check a manifest; whatever the file holds, an error is one sentence."""
    path = folder / name_of(step) / MANIFEST
    try:
        said = json.loads(path.read_bytes())
        if not isinstance(said, dict) or "format" not in said:
            raise _Bad("it is not the manifest of a checkpoint")
        if said["format"] != FORMAT:
            raise _Bad(f"it has format {str(said['format'])[:40]}, this version reads {FORMAT}")
        return _checked(said, step)
    except FileNotFoundError:
        there = ", ".join(map(str, steps_in(folder))) or "none"
        raise InputError(f"there is no checkpoint of step {step} in {folder}; complete ones: {there}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, _Bad) as error:
        raise GossamerError(_cannot(path, error)) from None


def _workers_of(folder: Path, step: int) -> int:
    """Return the number of workers of a complete checkpoint; 0 if there is none or it cannot be read."""
    try:
        return read_manifest(folder, step).workers
    except GossamerError:
        return 0


def read_part(folder: Path, manifest: Manifest, worker: int) -> dict[str, Any]:
    """Read the state of a worker; raise `GossamerError` if the file is not what was written."""
    path, part = folder / name_of(manifest.step) / part_name(worker), manifest.files[worker]
    try:
        size, digest = path.stat().st_size, hashlib.sha256()
        if size != part.bytes:
            raise _Bad(f"it has {size} bytes and the manifest says {part.bytes}")
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
        if digest.hexdigest() != part.sha256:
            raise _Bad("its content is not what was written (the checksum differs)")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state.keys() >= HELD:
            raise _Bad("it is not the state of a worker")
    except Exception as error:  # torch raises many types
        raise GossamerError(_cannot(path, error)) from error
    return state


class _Bad(Exception):
    """What is wrong with a file."""


def _cannot(path: Path, error: BaseException) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"cannot read checkpoint {path}: {said.splitlines()[0][:200]}; remove its folder to load an earlier one"


def _checked(said: dict[str, Any], step: int) -> Manifest:
    if said["step"] != step or isinstance(said["step"], bool):
        raise _Bad(f"it says step {str(said['step'])[:40]} in the folder of step {step}")
    files = []
    for worker, entry in enumerate(said["files"]):
        if entry["name"] != part_name(worker):
            raise _Bad(f"file {worker} is called {str(entry['name'])[:60]!r} and not {part_name(worker)!r}")
        numbers = (entry["bytes"], entry["steps"])
        if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(entry["sha256"], str):
            raise _Bad(f"the entry of {part_name(worker)} is not a size, a checksum and a number of steps")
        files.append(Part(entry["bytes"], entry["sha256"], entry["steps"]))
    groups = tuple(tuple(g) for g in said["groups"])
    if not files or sorted(w for g in groups for w in g) != list(range(len(files))):
        raise _Bad(f"its groups are not those of {len(files)} workers")
    return Manifest(step, groups, tuple(files))
