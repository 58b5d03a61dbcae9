"""Which transport carries the parameters of a job: what the user asks for, and what the device and the job allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.process_groups import available_backends
from gossamer.errors import InputError

TransportName = Literal["auto", "gloo", "tcp", "nccl", "host"]


def accelerator_of(tensors: Iterable[torch.Tensor]) -> Accelerator | None:
    """The accelerator that holds `tensors`; None if all are on the CPU (or on no device, which is refused later)."""
    devices = sorted({t.device for t in tensors if t.device.type not in ("cpu", "meta")}, key=str)
    if len(devices) > 1:
        raise InputError(
            f"the parameters are on several devices ({', '.join(map(str, devices))}), and a worker gossips from one; "
            "move the model to one device, or run one worker per device"
        )
    return Accelerator(devices[0]) if devices else None


def choose_transport(
    asked: TransportName,
    accelerator: Accelerator | None,
    algorithm: str,
    *,
    elastic: bool,
    asynchronous: bool,
    guarded: bool = False,
) -> Literal["gloo", "tcp", "nccl", "host"]:
    """The transport of a job; InputError if `asked` cannot carry it. `guarded`: values that arrive are checked."""
    device = "cpu" if accelerator is None else accelerator.device.type
    alone = "on_failure='continue'" if elastic else f"algorithm={algorithm!r}" if asynchronous else ""
    alone = alone or ("a NeighborGuard" if guarded else "")
    if asked == "host" or (asked == "auto" and accelerator is not None and (alone or not _has_nccl(device))):
        return "host"
    if asked == "auto":
        if accelerator is not None:
            return "nccl"
        return "tcp" if elastic else "gloo"
    if asked == "nccl":
        if accelerator is None or device != "cuda":
            raise InputError(
                f"transport='nccl' needs parameters on a CUDA or ROCm device, and they are on {device}; move the model "
                "there before decentralize(), or use transport='auto'"
            )
        if not _has_nccl(device):
            raise InputError("transport='nccl' needs a build of torch with NCCL; use transport='host'")
        if alone:
            raise InputError(
                f"transport='nccl' cannot be used with {alone}: its operations are only queued, and the device waits "
                "for the peer; use transport='host' or 'auto'"
            )
        return "nccl"
    if accelerator is not None:
        raise InputError(
            f"transport={asked!r} sends from the memory of the CPU, and the parameters are on {device}; use "
            "transport='host', which copies them through the host, or 'auto'"
        )
    if asked == "gloo" and elastic:
        raise InputError(
            "transport='gloo' cannot be used with on_failure='continue': gloo cannot stop waiting for a peer; use "
            "transport='tcp' or 'auto'"
        )
    return asked


def _has_nccl(device: str) -> bool:
    return device == "cuda" and available_backends()["nccl"]
