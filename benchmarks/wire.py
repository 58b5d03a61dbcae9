"""Quantized wires: how fast they encode and decode, and how far apart they leave the workers.

    python benchmarks/wire.py --out benchmarks/records/wire     # both parts; about two minutes
    python benchmarks/wire.py --only speed                      # or distance

Speeds are bytes of fp32 parameters per second on one core, larger than the caches; the best of several runs, beside a
plain copy. Distances are the mean consensus distance over the second half of 256 steps: every worker takes Adam-like
steps of 1e-3 per coordinate (a common drift and noise of its own), mixes by AER on 4 nodes of 4, and an exact average
every A steps is the anchor. `engine` is Gossamer itself on virtual workers with these steps as gradients; `nearest` and
`stochastic` are a simulation, because the engine rounds to the nearest only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import gossamer
from gossamer.comm import _native, quantized, wire_named
from gossamer.comm.wire import CHUNK
from gossamer.report.record import environment, write_record
from gossamer.topology import Layout, build

NODES = [4] * 4
STEPS, STEP = 256, 1e-3
AVERAGES = (0, 16, 32, 64, 128)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def speeds(elements: int, repeats: int) -> list[dict[str, Any]]:
    """By wire and implementation, seconds of every run."""
    x, anchor, out = torch.randn(elements), torch.randn(elements), torch.zeros(elements)
    rows = [{"what": "copy", "seconds": timed(lambda: out.copy_(x), repeats)}]
    kernels = _native.kernels()
    for how in ("native", "torch"):
        if how == "native" and kernels is None:
            print("native: no C compiler")
            continue
        with patch.object(_native, "kernels", lambda how=how: kernels if how == "native" else None):
            for name in ("bf16", "fp16", "int8", "int4"):
                wire = wire_named(name)
                payload = torch.zeros(wire.payload_bytes(elements), dtype=torch.uint8)
                encode = timed(lambda w=wire, p=payload: w.encode(x, p, anchor), repeats)
                decode = timed(lambda w=wire, p=payload: w.decode(p, out, 0, elements), repeats)
                room = torch.empty(2 * CHUNK).narrow
                correct = timed(
                    lambda w=wire, p=payload, r=room: w.correct(out, p, p, 0.5, lambda n: r(0, 0, n)), repeats
                )
                for what, seconds in (("encode", encode), ("decode", decode), ("correct", correct)):
                    rows.append({"what": f"{name}, {what}, {how}", "seconds": seconds})
    return [{**row, "gb_per_s": 4 * elements / min(row["seconds"]) / 1e9} for row in rows]


def rounded(d: Tensor, bits: int, stochastic: bool) -> Tensor:
    levels = 2 ** (bits - 1) - 1
    blocks = d.view(len(d), -1, quantized.BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / levels
    value = torch.where(scale > 0, blocks / scale, 0.0)
    q = torch.floor(value + torch.rand_like(value)) if stochastic else value.round()
    return (q.clamp(-levels, levels) * scale).view_as(d)


def moves(n: int, elements: int) -> list[Tensor]:
    """The steps of all workers: what they share changes every 32 steps, the rest is new in every step."""
    torch.manual_seed(0)
    made, drift = [], torch.zeros(elements)
    for k in range(STEPS):
        if k % 32 == 0:
            drift = torch.randn(elements)
        made.append(STEP * (0.3 * drift + 0.95 * torch.randn(n, elements)))
    return made


def late_mean(found: list[float]) -> float:
    return sum(found[STEPS // 2 :]) / (STEPS - STEPS // 2)


def distance(bits: int | None, every: int, stochastic: bool = False, anchored: bool = True) -> float:
    topology = build("aer", Layout.of(NODES))
    matrices = [torch.tensor(topology.matrix(k), dtype=torch.float32) for k in range(topology.period)]
    n, elements = sum(NODES), 64 * quantized.BLOCK
    start = 0.05 * torch.randn(elements, generator=torch.Generator().manual_seed(1))
    x, anchor = start.repeat(n, 1), start if anchored else torch.zeros(elements)
    found = []
    for k, move in enumerate(moves(n, elements)):
        x = x + move
        if every and (k + 1) % every == 0:
            anchor = x.mean(0)
            x = anchor.repeat(n, 1)
        else:
            q = x if bits is None else rounded(x - anchor, bits, stochastic)
            x = x + matrices[k % len(matrices)] @ q - q
        found.append(float((x - x.mean(0)).square().sum(1).mean().sqrt()))
    return late_mean(found)


def in_engine(wire: str, every: int) -> float:
    """The same steps, mixed by the engine: adapt then combine, as the simulation does, without staggered buckets."""
    n, elements = sum(NODES), 64 * quantized.BLOCK
    start = 0.05 * torch.randn(elements, generator=torch.Generator().manual_seed(1))
    models = [nn.ParameterList([nn.Parameter(start.clone())]) for _ in range(n)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    cluster = gossamer.VirtualCluster(per_node=NODES)
    policy = gossamer.ATC(average_every=every)
    cluster.decentralize(
        models, optimizers, topology="aer", algorithm=policy, wire=wire, exchange=gossamer.Exchange(stagger=False)
    )
    found = []
    try:
        for move in moves(n, elements):
            for worker, model in enumerate(models):
                model[0].grad = -move[worker]
            for optimizer in optimizers:
                optimizer.step()
            found.append(cluster.consensus_distance())
    finally:
        cluster.close()
    return late_mean(found)


def distances() -> list[dict[str, Any]]:
    rows = [{"wire": "fp32", "average_every": every, "engine": in_engine("fp32", every)} for every in AVERAGES]
    for row in rows:
        row["nearest"] = distance(None, row["average_every"])
    for bits in (8, 4):
        plain = distance(bits, 0, anchored=False)
        rows.append({"wire": f"int{bits}, not anchored", "average_every": 0, "nearest": plain})
        for every in AVERAGES:
            row = {"wire": f"int{bits}", "average_every": every, "engine": in_engine(f"int{bits}", every)}
            rows.append({**row, "nearest": distance(bits, every), "stochastic": distance(bits, every, True)})
    return rows


def table(fast: list[dict[str, Any]], far: list[dict[str, Any]], megabytes: float) -> str:
    lines = []
    if fast:
        lines = [f"GB of fp32 parameters per second on one core, the best of the runs ({megabytes:g} MB):", ""]
        lines += ["| | GB/s |", "|---|---|", *(f"| {r['what']} | {r['gb_per_s']:.2f} |" for r in fast), ""]
    if far:
        lines += ["Consensus distance between exact averages, while all workers take steps:", ""]
        lines += ["| wire | exact average every | engine | nearest | stochastic |", "|---|---|---|---|---|"]
        for r in far:
            cells = [f"{r[k]:.4f}" if k in r else "" for k in ("engine", "nearest", "stochastic")]
            lines.append(f"| {r['wire']} | {r['average_every'] or 'none'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("speed", "distance"), help="one part (default: both)")
    parser.add_argument("--mb", type=float, default=256.0, help="size of the parameters in MB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write a record to this folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = environment()
    fast = speeds(round(args.mb * 1e6 / 4), args.repeats) if args.only != "distance" else []
    far = distances() if args.only != "speed" else []
    summary = table(fast, far, args.mb)
    print(summary)
    if args.out:
        write_record(args.out, data={"speeds": fast, "distances": far}, summary=summary, environment=machine)


if __name__ == "__main__":
    main()
