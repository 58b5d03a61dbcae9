"""GossipAdamW and AccumAdamW against torch.optim.AdamW (and Decent-DP's AccumAdam where installed), on CPU.

    python benchmarks/optim.py                        # one thread, 8.4 M parameters in 32 tensors, a table
    python benchmarks/optim.py --clock cpu            # on a busy machine: processor time instead of wall time
    python benchmarks/optim.py --out benchmarks/records/optim --note "quiet machine"

All optimizers step on the same parameters and gradients in turn, so that noise affects them alike. A sample is the
mean over the steps of one accumulation; ratios are of the medians, to AdamW(fused=True) on the same parameters.

"GossipAdamW measured" is the step of static jobs, in which the signal is measured between the workers: its parameters
have different shares of the signal, as different as they can be. "GossipAdamW native" is the step by a worker's own
gradients, of elastic and asynchronous jobs. Both have 16 replicas.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from gossamer.optim import AccumAdamW, GossipAdamW, _native

BASE = "torch AdamW fused"
REPLICAS = 16
SMALL = 1 << 12  # elements of a small tensor
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def tensors_of(workload: str, tensors: int, numel: int) -> list[torch.nn.Parameter]:
    """`tensors` × `numel` elements of parameters, with gradients in the same layout."""
    small = workload == "small tensors"
    count, each = (tensors * numel // SMALL, SMALL) if small else (tensors, numel)
    values = [torch.randn(each) for _ in range(count)]
    if workload == "channels_last":
        values = [v.view(-1, 64, 2, 2).to(memory_format=torch.channels_last) for v in values]
    elif workload == "bfloat16":
        values = [v.bfloat16() for v in values]
    params = [torch.nn.Parameter(v) for v in values]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def measured(params: list[torch.nn.Parameter]) -> GossipAdamW:
    """The optimizer as `decentralize` sets it, with shares that make as many factors of V as possible."""
    optimizer = GossipAdamW(params)
    optimizer.set_replicas(REPLICAS)
    factors = [REPLICAS ** -(i / max(1, len(params) - 1)) for i in range(len(params))]
    shares = [max(0.0, (factor - 1 / REPLICAS) / (1 - 1 / REPLICAS)) for factor in factors]
    optimizer.set_signal_shares(dict(zip(params, shares, strict=True)))
    return optimizer


def contestants(params: list[torch.nn.Parameter], accumulate: int) -> dict[str, torch.optim.Optimizer]:
    adamw = torch.optim.AdamW
    result: dict[str, torch.optim.Optimizer] = {
        BASE: adamw(params, fused=True),
        "torch AdamW foreach": adamw(params, foreach=True),
        "torch AdamW for-loop": adamw(params, foreach=False),
        "GossipAdamW measured": measured(params),
        "GossipAdamW native": GossipAdamW(params, replicas=REPLICAS),
        "GossipAdamW without kernel": GossipAdamW(params, replicas=REPLICAS),
        "GossipAdamW 1 replica, fused": GossipAdamW(params, fused=True),
        "AccumAdamW native": AccumAdamW(params, accumulate=accumulate),
        "AccumAdamW without kernel": AccumAdamW(params, accumulate=accumulate),
        "AccumAdamW accumulate=1, fused": AccumAdamW(params, accumulate=1, fused=True),
    }
    try:
        from decent_dp.optim import AccumAdam as DecentAccumAdam
    except ImportError:
        print("decent-dp is not installed: left out (pip install decent-dp==0.2.3)", file=sys.stderr)
    else:
        result["decent-dp AccumAdam"] = DecentAccumAdam(params, accum_iter=accumulate)
    return result


def without_kernel(step: Callable[[], object]) -> Callable[[], object]:
    """The step as on a machine without a C compiler."""

    def run() -> None:
        with patch.object(_native, "kernels", lambda: None):
            step()

    return run


def measure(
    steps: dict[str, Callable[[], object]], accumulate: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds per step; the first round of each optimizer is a warm-up and left out."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start = clock()
            for _ in range(accumulate):
                step()
            if repeat:
                samples[name].append((clock() - start) * 1e3 / accumulate)
    return samples


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--numel", type=int, default=1 << 18, help="elements of one tensor, a multiple of 256")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", default="", help="what a reader of the record should know about the machine")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if _native.kernels() is None:
        print("the native kernels are not available: torch operations run in their place", file=sys.stderr)
    steps = {
        name: without_kernel(opt.step) if name.endswith("without kernel") else opt.step
        for name, opt in contestants(tensors_of("", args.tensors, args.numel), args.accumulate).items()
    }
    base_of = dict.fromkeys(steps, BASE)
    for workload in ("small tensors", "channels_last", "bfloat16"):
        params = tensors_of(workload, args.tensors, args.numel)
        base, ours = f"{BASE}, {workload}", f"GossipAdamW measured, {workload}"
        steps |= {base: torch.optim.AdamW(params, fused=True).step, ours: measured(params).step}
        base_of |= {base: base, ours: base}
    samples = measure(steps, args.accumulate, args.repeats, CLOCKS[args.clock])

    table = Table("optimizer", "median ms", "min ms", "ratio", title=f"{args.tensors} tensors of {args.numel}")
    ratios = {}
    for name, values in samples.items():
        ratios[name] = statistics.median(values) / statistics.median(samples[base_of[name]])
        table.add_row(name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{ratios[name]:.2f}")
    Console().print(table)

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {
            "command": shlex.join(["python", "benchmarks/optim.py", *sys.argv[1:]]),
            "note": args.note,
            "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()},
            "versions": {
                "python": platform.python_version(),
                **{p: version(p) for p in ("torch", "gossamer", "decent-dp")},
            },
            "settings": {k: v for k, v in vars(args).items() if k not in ("out", "note")},
            "ratio_of_medians": ratios,
            "milliseconds_per_step": samples,
        }
        (args.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        with (args.out / "table.txt").open("w") as file:
            Console(file=file, width=100).print(table)


if __name__ == "__main__":
    main()
