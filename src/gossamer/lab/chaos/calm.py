"""The final loss of an earlier run without faults, to compare with: it must have trained the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.lab.chaos.run import ChaosConfig
from gossamer.predict.methods import parse


def calm_loss(folder: Path, chaos: ChaosConfig) -> float:
    """The final loss in a record of `gossamer chaos --faults 0`.

    Raises InputError if there is no such record, or if its job differs from that of `chaos` in a setting on which the
    loss depends.
    """
    try:
        record = json.loads((folder / "record.json").read_text())
        loss, faults = record["final_loss"], record["faults"]
        theirs = _settings_of_record(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"there is no record of a run in {folder}; write one with gossamer chaos --faults 0 --out {folder}"
        ) from None
    if faults or not isinstance(loss, float):
        raise InputError(f"the run in {folder} had {len(faults)} faults and is not calm; name one of --faults 0")
    for what, mine in _settings_of(chaos).items():
        if theirs[what] != mine:
            raise InputError(
                f"the run in {folder} cannot be compared: its {what} is {_text(theirs[what])}, and that of this run is "
                f"{_text(mine)}; name a record of the same settings, or leave --calm-from out"
            )
    return loss


def _settings_of(chaos: ChaosConfig) -> dict[str, Any]:
    return {
        "method": str(chaos.parsed),
        "number of workers per node": list(chaos.per_node),
        "length in seconds": chaos.seconds,
        "compute time": chaos.compute,
        "number of steps between meetings": chaos.meet_every,
        "learning rate": chaos.learning_rate,
        "soft deadline": chaos.soft,
        "hard deadline": chaos.hard,
    }


def _settings_of_record(record: dict[str, Any]) -> dict[str, Any]:
    job = record["job"]
    return {
        "method": str(parse(job["method"])),
        "number of workers per node": record["cluster"]["per_node"],
        "length in seconds": record["seconds"],
        "compute time": job["compute"],
        "number of steps between meetings": job.get("meet_every", 0),  # older runs did not meet
        "learning rate": job["lr"],
        "soft deadline": job["soft"],
        "hard deadline": job["hard"],
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return "learned" if value is None else str(value)
