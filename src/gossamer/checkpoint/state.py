"""What a checkpoint holds of a worker, and how the states of several workers are combined.

When n workers were saved and m load, worker j of m takes the place of the old workers in the interval
[j n/m, (j+1) n/m) of 0..n: their parameters and optimizer moments are averaged, weighted by how much of each old worker
lies in the interval. Every old worker then has the weight m/n over all new workers, so the mean over the workers does
not change. With m = 2n, neighbors are clones.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer import InputError, MixedParameters

State = dict[str, Any]
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, without the wrappers of DDP and torch.compile."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def snapshot(value: Any) -> Any:
    """Copy a value to the CPU, in types that can be read without running pickled code."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {k: snapshot(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(snapshot(v) for v in value) if type(value) in (list, tuple) else [snapshot(v) for v in value]
    if value is None or isinstance(value, PLAIN):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise InputError(
        f"a checkpoint cannot hold a {type(value).__module__}.{type(value).__name__}, which would need code to read; "
        "pass its state_dict(), or tensors, numbers, text, lists and dictionaries"
    )


def describe_mixed(mixed: MixedParameters, model: nn.Module, optimizers: Sequence[Optimizer]) -> State:
    """Describe by name which parameters are mixed, and where they lie in the flat buffers of each lane."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    held = {id(p) for lane in mixed.lanes for _, places in lane for p, _ in places}
    return {
        "buffers": mixed.buffers,
        "local": [name for key, found in names.items() if key not in held for name in found],
        "optimizers": [
            [at for at, p in enumerate(p for g in o.param_groups for p in g["params"]) if id(p) in held]
            for o in optimizers
        ],
        "lanes": [
            [
                (size, [(names[id(p)], start, tuple(p.shape), tuple(p.stride())) for p, start in places])
                for size, places in lane
            ]
            for lane in mixed.lanes
        ],
    }


def values_of(state: State) -> dict[str, Any]:
    """Return this worker's model. Asynchronous gossip keeps its parameters apart from those of the last gradient."""
    values = dict(state["model"])
    if state["gossip"] is None:
        return values
    for lane, flats in zip(state["gossip"]["lanes"], state["mixed"]["lanes"], strict=True):
        pieces = list(lane.get("x") or ())
        for size, places in flats if pieces else ():
            taken: list[Tensor] = []
            while sum(p.numel() for p in taken) < size:
                taken.append(pieces.pop(0))
            flat = torch.cat(taken)
            for names, start, shape, stride in places:
                for name in names:
                    values[name] = flat.as_strided(shape, stride, start)
    return values


def shares(group: Sequence[int], workers: int, before: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Return the old replicas that the new replica of `group` is averaged from: pairs (first worker, weight).

    `group` holds consecutive workers of `workers`, and `before` the old groups. The weights sum to 1.
    """
    n = sum(len(g) for g in before)
    low, high = group[0] * n / workers, (group[-1] + 1) * n / workers
    found = []
    for earlier in before:
        inside = sum(max(0.0, min(high, w + 1) - max(low, w)) for w in earlier)
        if inside > 1e-9 * n:
            found.append((earlier[0], inside))
    total = math.fsum(weight for _, weight in found)
    return [(worker, weight / total) for worker, weight in found]


def blend(states: Sequence[State], weights: Sequence[float]) -> State:
    """Average the states of several workers into one.

    Mixed parameters, floating-point buffers and the optimizer's tensors are averaged; integer buffers take the maximum;
    everything else comes from the worker with the largest weight.
    """
    at = max(range(len(states)), key=weights.__getitem__)
    main = states[at]
    if len(states) == 1:
        return {**main, "model": values_of(main)}
    mixed = main["mixed"]
    return {
        **main,
        "model": _blend_models([values_of(s) for s in states], weights, at, kept_local(main)),
        "optimizer": [
            _blend_optimizers([s["optimizer"][o] for s in states], weights, at, mixed and mixed["optimizers"][o])
            for o in range(len(main["optimizer"]))
        ],
    }


def kept_local(state: State) -> set[str]:
    """Return what each worker keeps for itself: parameters that are not mixed, and buffers with buffers="local"."""
    mixed = state["mixed"]
    if mixed is None:
        return set()
    names = {n for lane in mixed["lanes"] for _, places in lane for p in places for n in p[0]}
    local = set(mixed["local"])
    return local if mixed["buffers"] == "average" else local | (set(state["model"]) - names)


def _blend_models(models: Sequence[State], weights: Sequence[float], at: int, local: set[str]) -> State:
    return {
        name: value if name in local else _average([m[name] for m in models], weights, at)
        for name, value in models[at].items()
    }


def _blend_optimizers(saved: Sequence[State], weights: Sequence[float], at: int, mixed: list[int] | None) -> State:
    """Average the moments of each parameter that all workers have at the same count of an accumulation."""
    states = {}
    for index, own in saved[at]["state"].items():
        others = [s["state"].get(index) for s in saved]
        counts = [{k: v for k, v in o.items() if isinstance(v, int)} if o else None for o in others]
        if any(c != counts[at] for c in counts) or (mixed is not None and index not in mixed):
            states[index] = own
            continue
        states[index] = {
            key: _average([o[key] for o in others], weights, at) if isinstance(value, Tensor) and value.dim() else value
            for key, value in own.items()
        }
    return {**saved[at], "state": states}


def _average(values: Sequence[Any], weights: Sequence[float], at: int) -> Any:
    own = values[at]
    if not isinstance(own, Tensor) or own.is_complex() or all(torch.equal(v, own) for v in values):
        return own
    if not own.is_floating_point():
        return torch.stack(list(values)).amax(dim=0)
    total = torch.zeros_like(own, dtype=torch.float64)
    for value, weight in zip(values, weights, strict=True):
        total.add_(value, alpha=weight)
    return total.to(own.dtype)


# -- random numbers -------------------------------------------------------------------------------------------------


def random_state() -> State:
    """Return the states of the global generators of torch, Python and, if it is imported, numpy."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, [int(k) for k in keys], *rest]
    return state


def set_random_state(state: State) -> None:
    """Set the global generators to the states of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
