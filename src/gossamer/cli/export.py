"""`gossamer export`: write the consensus model of a run as a plain state_dict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli.common import Json, Output, command_app, count_of, print_json, print_rich
from gossamer.errors import InputError

app = command_app()


@app.command(epilog="Example: gossamer export runs/a -o model.pt")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run of gossamer train, or a folder of checkpoints.")],
    output: Output,
    step: Annotated[
        int | None, typer.Option(metavar="K", help="Step of the checkpoint. By default the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the mean model of all workers; torch.load(FILE, weights_only=True) reads it without Gossamer."""
    import torch

    from gossamer.checkpoint import consensus

    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; pass the --out of gossamer train")
    where = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    manifest, model = consensus(where, step)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        torch.save(model, beside)
        beside.replace(output)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if it cannot open the file
        beside.unlink(missing_ok=True)
        said = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
        raise InputError(f"cannot write {output}: {said}; choose another --output") from None
    tensors = [v for v in model.values() if isinstance(v, torch.Tensor)]
    count = sum(t.numel() for t in tensors)
    facts = {
        "file": str(output),
        "step": manifest.step,
        "workers": manifest.workers,
        "tensors": len(tensors),
        "values": count,
        "bytes": output.stat().st_size,
    }
    if as_json:
        print_json(facts)
    else:
        print_rich(
            f"{output}: the mean of {count_of(manifest.workers, 'worker')} after step {manifest.step}, "
            f"{count_of(count, 'value')}",
            f"read it with: model.load_state_dict(torch.load({str(output)!r}, weights_only=True))",
        )
