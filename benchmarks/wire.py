"""Quantized wires: how fast they encode and decode, and how far apart they leave the workers.

    python benchmarks/wire.py                # speed, with the native kernels and with torch operations
    python benchmarks/wire.py --distance     # the consensus distance on 16 workers, nearest against stochastic rounding

Speeds are bytes of fp32 parameters per second on one core, larger than the caches; the best of several runs, beside a
plain copy. The distance is simulated: every worker takes Adam-like steps of 1e-3 per coordinate (a common drift and
noise of its own), mixes by AER on 4 nodes of 4, and an exact average every A steps is the anchor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from gossamer.comm import quantized, wire_named
from gossamer.topology import Layout, build

NODES = [4] * 4


def best(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def speeds(elements: int, repeats: int) -> None:
    x, anchor, out = torch.randn(elements), torch.randn(elements), torch.zeros(elements)
    print(f"copy: {4 * elements / best(lambda: out.copy_(x), repeats) / 1e9:.2f} GB/s of {4 * elements / 1e6:.0f} MB")
    kernels = quantized._kernels()
    for how in ("native", "torch"):
        if how == "native" and kernels is None:
            print("native: no C compiler")
            continue
        with patch.object(quantized, "_kernels", lambda how=how: kernels if how == "native" else None):
            for name in ("int8", "int4"):
                wire = wire_named(name)
                payload = torch.zeros(wire.payload_bytes(elements), dtype=torch.uint8)
                encode = best(lambda w=wire, p=payload: w.encode(x, p, anchor), repeats)
                decode = best(lambda w=wire, p=payload: w.decode(p, out, 0, elements), repeats)
                rates = (4 * elements / seconds / 1e9 for seconds in (encode, decode))
                print("{} {}: encode {:.2f} GB/s, decode {:.2f} GB/s".format(how, name, *rates))


def rounded(d: Tensor, bits: int, stochastic: bool) -> Tensor:
    levels = 2 ** (bits - 1) - 1
    blocks = d.view(len(d), -1, quantized.BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / levels
    value = torch.where(scale > 0, blocks / scale, 0.0)
    q = torch.floor(value + torch.rand_like(value)) if stochastic else value.round()
    return (q.clamp(-levels, levels) * scale).view_as(d)


def distance(bits: int | None, every: int, stochastic: bool, anchored: bool = True, steps: int = 256) -> float:
    """The mean consensus distance over the second half of the steps."""
    torch.manual_seed(0)
    topology = build("aer", Layout.of(NODES))
    matrices = [torch.tensor(topology.matrix(k), dtype=torch.float32) for k in range(topology.period)]
    n, elements = sum(NODES), 64 * quantized.BLOCK
    start = 0.05 * torch.randn(elements)
    x, anchor = start.repeat(n, 1), start if anchored else torch.zeros(elements)
    drift, found = torch.zeros(elements), []
    for k in range(steps):
        if k % 32 == 0:
            drift = torch.randn(elements)
        x = x + 1e-3 * (0.3 * drift + 0.95 * torch.randn(n, elements))
        if every and (k + 1) % every == 0:
            anchor = x.mean(0)
            x = anchor.repeat(n, 1)
        else:
            q = x if bits is None else rounded(x - anchor, bits, stochastic)
            x = x + matrices[k % len(matrices)] @ q - q
        found.append(float((x - x.mean(0)).square().sum(1).mean().sqrt()))
    return sum(found[steps // 2 :]) / (steps - steps // 2)


def distances() -> None:
    print(f"fp32, no exact averages: {distance(None, 0, False):.4f}")
    for bits in (8, 4):
        print(f"int{bits}, not anchored: {distance(bits, 0, False, anchored=False):.4f}")
        for every in (0, 16, 32, 64, 128):
            nearest, stochastic = distance(bits, every, False), distance(bits, every, True)
            print(f"int{bits}, an exact average every {every}: nearest {nearest:.4f}, stochastic {stochastic:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distance", action="store_true", help="simulate the consensus distance instead")
    parser.add_argument("--mb", type=float, default=256.0, help="size of the parameters in MB")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.distance:
        distances()
    else:
        speeds(round(arguments.mb * 1e6 / 4), arguments.repeats)


if __name__ == "__main__":
    main()
