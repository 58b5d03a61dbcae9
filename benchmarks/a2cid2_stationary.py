"""How far apart workers stay under forcing, A2CiD2 over AD-PSGD at the same number of communications.

python benchmarks/a2cid2_stationary.py [--record benchmarks/records/a2cid2-stationary]

Rings of virtual workers; each step adds a displacement that does not depend on the parameters: a number of each
worker's own, always the same (workers with different data), or i.i.d. noise. `study` is the virtual-time simulation
(gossamer.predict.asynchronous); `engine` is decentralize() itself on a VirtualCluster.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import nn

from gossamer import VirtualCluster
from gossamer import algorithm as as_policy
from gossamer.predict.asynchronous import ALGORITHMS, consensus_study
from gossamer.report.record import environment, write_record
from gossamer.topology import Layout, build
from gossamer.topology.a2cid2 import rates_of

FORCINGS = ("constant", "noise")
SEEDS = 5
RUNS = 16
NUMBERS = 64  # parameters of the engine's model: independent numbers that share the exchanges


def units_of(n: int) -> int:
    """Eight relaxation times; the second half is the stationary one."""
    chi1 = rates_of(build("ring", Layout.flat(n))).chi1
    assert chi1 is not None
    return round(8 * chi1)


def by_study(n: int, forcing: Any, seed: int) -> dict[str, float]:
    ring = build("ring", Layout.flat(n))
    curves = [consensus_study(ring, a, forcing=forcing, units=units_of(n), runs=RUNS, seed=seed) for a in ALGORITHMS]
    assert curves[0].communications[-1] == curves[1].communications[-1]  # the very same exchanges
    return {c.algorithm: c.stationary() for c in curves}


def by_engine(n: int, forcing: str, seed: int) -> dict[str, float]:
    found = {}
    for algorithm in ALGORITHMS:
        generator = torch.Generator().manual_seed(seed)
        center = torch.randn(n, NUMBERS, generator=generator, dtype=torch.float64)
        models = [nn.ParameterList([torch.zeros(NUMBERS, dtype=torch.float64)]) for _ in range(n)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
        with VirtualCluster(n) as cluster:
            cluster.decentralize(models, optimizers, topology="ring", algorithm=as_policy(algorithm, seed=seed))
            squares = []
            for step in range(units_of(n)):
                for i in range(n):
                    noise = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)
                    models[i][0].grad = -(center[i] if forcing == "constant" else noise)
                    optimizers[i].step()
                if step >= units_of(n) // 2 and step % 4 == 0:
                    squares.append(cluster.consensus_distance() ** 2 / NUMBERS)
        found[algorithm] = statistics.mean(squares) ** 0.5
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", help="write a record to this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = environment()
    rows = []
    for how, n in (("study", 16), ("study", 64), ("engine", 16)):
        for forcing in FORCINGS:
            measure = by_study if how == "study" else by_engine
            samples = [measure(n, forcing, seed) for seed in range(SEEDS)]
            ratios = [s["a2cid2"] / s["ad-psgd"] for s in samples]
            row = {
                "how": how,
                "workers": n,
                "forcing": forcing,
                "units": units_of(n),
                "samples": samples,
                "ratio_mean": statistics.mean(ratios),
                "ratio_std": statistics.stdev(ratios),
            }
            rows.append(row)
            print(f"{how} ring {n} {forcing}: {row['ratio_mean']:.3f} ± {row['ratio_std']:.3f}", flush=True)
    if arguments.record:
        lines = ["| ring | forcing | by | AD-PSGD | A2CiD2 | ratio, 5 seeds |", "|---|---|---|---|---|---|"]
        for r in rows:
            mean = {a: statistics.mean(s[a] for s in r["samples"]) for a in ALGORITHMS}
            lines.append(
                f"| {r['workers']} | {r['forcing']} | {r['how']} | {mean['ad-psgd']:.3f} | {mean['a2cid2']:.3f} | "
                f"{r['ratio_mean']:.3f} ± {r['ratio_std']:.3f} |"
            )
        summary = (
            "Stationary consensus distance (RMS over workers, in units of one step's displacement) on a ring of "
            "virtual workers, rate 1, the same exchanges for both methods.\n\n" + "\n".join(lines) + "\n\n"
            "A2CiD2 holds workers with different data together, the more so the longer the ring; against i.i.d. noise, "
            "most of which is in fast modes, it gains little or nothing."
        )
        write_record(arguments.record, data={"results": rows}, summary=summary, environment=before)


if __name__ == "__main__":
    main()
