"""Comparison of all workers' settings and models at the start, and the error that all workers raise if they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch import Tensor

from gossamer.engine.flat import is_sharded
from gossamer.engine.policies import Asynchronous
from gossamer.engine.prepared import Prepared
from gossamer.errors import InputError


def describe(prepared: Prepared) -> dict[str, Any]:
    """A worker's settings, topology, parameters, buffers and buckets as plain values in a fixed order."""
    settings, topology, lanes, model = (
        prepared.settings,
        prepared.schedule.topology,
        prepared.buckets,
        prepared.model,
    )
    rounds = [topology.rounds[k] for k in range(min(topology.period, 64))]
    return {
        "algorithm": settings.algorithm.name,
        "outer": None if isinstance(settings.algorithm, Asynchronous) else type(settings.algorithm.outer).__name__,
        "settings": asdict(settings, dict_factory=_plain),
        "topology": {
            "name": topology.name,
            "workers": topology.n,
            "per_node": list(topology.layout.per_node),
            "period": topology.period,
            "rounds": hashlib.sha256(repr(rounds).encode()).hexdigest()[:16],
        },
        "parameters": [
            [
                [p.name, list(p.parameter.shape), str(p.parameter.dtype), _memory_format(p.parameter)]
                for p in flat.places
            ]
            for flats in prepared.flats
            for flat in flats
        ],
        "model": [
            [[name, list(t.shape), str(t.dtype)] for name, t in tensors]
            for tensors in (model.named_parameters(), model.named_buffers())
        ],
        # a node's shards may have different sizes; those of different nodes then still match
        "buckets": [] if prepared.sharded else [[b.x.numel() for b in buckets] for buckets in lanes],
    }


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.total_seconds() if isinstance(value, timedelta) else value for key, value in items}


def _memory_format(parameter: Tensor) -> str:
    """The order of a parameter's elements in memory. It must be equal, because averages are over memory."""
    if is_sharded(parameter):
        return "sharded"
    return f"strides {[s for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n > 1]}"


def agree(texts: Sequence[str], cause: Exception | None = None) -> None:
    """Raise the same `InputError` on every worker: the error of a worker, or the first difference from worker 0."""
    everyone = [json.loads(t) for t in texts]
    for worker, theirs in enumerate(everyone):
        if "error" in theirs:
            raise InputError(f"worker {worker}: {theirs['error']}") from cause
    for worker, theirs in enumerate(everyone):
        found = _difference(everyone[0], theirs, "")
        if found is not None:
            where, first, other = found
            raise InputError(
                f"workers disagree on {where}: worker 0 has {first}, worker {worker} has {other}; every worker must "
                "build the same model and pass the same arguments to decentralize()"
            )


def _difference(a: Any, b: Any, where: str) -> tuple[str, str, str] | None:
    """The first place where two nested values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:
            found = _difference(a[key], b.get(key), f"{where}.{key}" if where else key)
            if found is not None:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        for at, (x, y) in enumerate(zip(a, b, strict=False)):
            found = _difference(x, y, f"{where}[{at}]")
            if found is not None:
                return found
        if len(a) != len(b):
            longer = a if len(a) > len(b) else b
            extra = json.dumps(longer[min(len(a), len(b))])
            return f"the length of {where} (first extra: {extra})", str(len(a)), str(len(b))
        return None
    return None if a == b else (where, json.dumps(a), json.dumps(b))
