"""Flat buffers: the parameters of a lane lie in the memory of one buffer per dtype and device, cut into buckets.

An exchange then sends from the parameters' memory itself, without packing, and needs one receive buffer. A bucket is a
plain slice and may cut a parameter in two. Sharded parameters (FSDP2) keep their storage: their local shards are packed
into the buffer before an exchange and written back after it.

Note [Why every parameter has a storage of its own]
    A slice of the buffer is a view: all parameters would share the buffer's storage. Savers that look at storages
    (safetensors, Accelerate, hub savers) take parameters of one storage for tied weights and keep one of them, and
    `torch.save` of one parameter writes all of them. So a parameter is no view but a tensor with a storage that covers
    its own part of the buffer's memory; DLPack makes such a tensor on CPU and CUDA, and it keeps the buffer alive.
    Calls that replace the contents of a storage (`share_memory_()`, sending a parameter to another process) move the
    parameter out of the buffer, which `Flat.check` finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from gossamer.errors import GossamerError, InputError
from gossamer.topology.schedule import bucket_count

ALIGN_BYTES = 64


@dataclass(frozen=True)
class Place:
    """The place of a parameter in its flat buffer."""

    name: str
    parameter: nn.Parameter
    start: int
    elements: int


@dataclass
class Flat:
    """One buffer and its parameters. If `packed`, the parameters (local shards of DTensors) have memory of their own;
    otherwise they lie in the buffer."""

    buffer: Tensor
    places: list[Place]
    packed: bool

    def __post_init__(self) -> None:
        self._pointers = [_local(p.parameter).data_ptr() for p in self.places]

    def check(self) -> None:
        """Raise if a parameter has been moved to other memory (by `.to()`, `share_memory()`, assignment to `.data`)."""
        for place, pointer in zip(self.places, self._pointers, strict=True):
            tensor = _local(place.parameter) if self.packed else place.parameter
            if tensor.data_ptr() != pointer:
                if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]
                    raise GossamerError(
                        f"parameter {place.name!r} was moved to shared memory after decentralize() (by share_memory() "
                        "or by sending it to another process); share or send a copy: copy.deepcopy(model)"
                    )
                raise GossamerError(
                    f"parameter {place.name!r} was moved to other storage after decentralize() (by .to(), .half() or "
                    "an assignment to .data); move and cast the model first, then call decentralize()"
                )

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the parameters into the buffer if they do not lie in it."""
        if self.packed:
            for place in self.places:
                self.buffer[place.start : place.start + place.elements].copy_(_local(place.parameter).reshape(-1))

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the buffer into the parameters if they do not lie in it."""
        if self.packed:
            for place in self.places:
                shard = _local(place.parameter)
                shard.copy_(self.buffer[place.start : place.start + place.elements].view(shard.shape))

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter memory of its own again."""
        if not self.packed:
            for place in self.places:
                place.parameter.data = place.parameter.data.clone(memory_format=torch.preserve_format)


@dataclass(frozen=True)
class Bucket:
    """Slice number `index` of a lane's parameters; `x` is the storage itself."""

    index: int
    flat: Flat
    x: Tensor


def _local(parameter: Tensor) -> Tensor:
    """The tensor that holds this worker's values: a DTensor's local shard, else the parameter itself."""
    data = parameter.detach()
    return data.to_local() if hasattr(data, "to_local") else data


def is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "to_local")


@torch.no_grad()
def flatten(named: Sequence[tuple[str, nn.Parameter]]) -> list[Flat]:
    """Lay the parameters out in flat buffers, in the given order: one buffer per dtype, device and kind (sharded or
    not)."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        if parameter.is_meta:
            raise InputError(
                f"parameter {name!r} is on the meta device and has no values; materialize and initialize the model "
                "(model.to_empty(device=...)) before decentralize()"
            )
        if parameter.is_complex():
            raise InputError(f"parameter {name!r} is complex; store it as a real tensor (torch.view_as_real) to mix it")
        key = (parameter.dtype, parameter.device, is_sharded(parameter))
        kinds.setdefault(key, []).append((name, parameter))
    flats = []
    for (dtype, device, packed), members in kinds.items():
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        places, total = [], 0
        for name, parameter in members:
            elements = _local(parameter).numel()
            places.append(Place(name, parameter, total, elements))
            total += -(-elements // align) * align
        buffer = torch.zeros(total, dtype=dtype, device=device)
        if not packed:
            for place in places:
                _point_into(buffer, place)
        flats.append(Flat(buffer, places, packed))
        flats[-1].pack()
    return flats


def _point_into(buffer: Tensor, place: Place) -> None:
    """Move a parameter into the buffer. See Note [Why every parameter has a storage of its own]."""
    parameter = place.parameter
    part = buffer[place.start : place.start + place.elements]
    home = _own_storage(part)
    # a parameter that is dense in another order of dimensions (channels_last) keeps its strides
    dense = torch.empty_like(parameter.data, memory_format=torch.preserve_format).stride() == parameter.stride()
    value = home.as_strided(parameter.shape, parameter.stride()) if dense else home.view(parameter.shape)
    value.copy_(parameter.data)
    parameter.data = value


def _own_storage(part: Tensor) -> Tensor:
    """A tensor in the memory of `part` with a storage of its own; a view on devices that DLPack does not know."""
    try:
        return from_dlpack(part.view(torch.uint8)).view(part.dtype)  # as bytes: DLPack does not know every dtype
    except (BufferError, RuntimeError, ValueError):
        if part.device.type in ("cpu", "cuda"):
            raise
        return part


def refuse_overlaps(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory without being one object: `flatten` would separate them. Call it for all
    parameters of a model before any is laid out."""
    spans = []
    for name, parameter in named:
        if parameter.is_meta:
            continue  # `flatten` refuses it
        local = _local(parameter)
        if local.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            spans.append((str(local.device), local.data_ptr(), extent * local.element_size(), name))
    spans.sort()
    for (device, start, length, name), (next_device, next_start, _, next_name) in pairwise(spans):
        if device == next_device and next_start < start + length:
            raise InputError(
                f"parameters {name!r} and {next_name!r} share memory without being one object; tie them by assigning "
                "the same nn.Parameter to both places"
            )


def cut(flats: Sequence[Flat], bucket_bytes: int | None, period: int, fragments: int = 1) -> list[Bucket]:
    """Cut the buffers into buckets of equal size: of at most `bucket_bytes`, or as many as `bucket_count` chooses.

    Every buffer has a multiple of `fragments` buckets, unless it is too small for that many.
    """
    buckets: list[Bucket] = []
    for flat in flats:
        elements, item = flat.buffer.numel(), flat.buffer.element_size()
        if bucket_bytes is None:
            count = bucket_count(elements * item, period, fragments)
        else:
            count = -(-elements * item // bucket_bytes)
            count = max(1, -(-count // fragments)) * fragments
        align = max(1, ALIGN_BYTES // item)
        units = -(-elements // align)
        count = min(count, max(1, units // fragments) * fragments)
        starts = [units * b // count * align for b in range(count + 1)]
        for start, stop in pairwise(starts):
            if start < stop:  # the others are empty: so few parameters
                buckets.append(Bucket(len(buckets), flat, flat.buffer[start:stop]))
    return buckets


def longest_message(model: nn.Module) -> int:
    """More bytes than any message about `model` has: averages of parameters, buffers and moments, in any dtype."""
    tensors = [*model.parameters(), *model.buffers()]
    return 2**20 + 4 * sum(t.numel() * max(8, t.element_size()) for t in tensors)
