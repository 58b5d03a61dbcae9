"""How much curvature gossip with momentum endures, by topology and by when it mixes: linear theory, in seconds.

    python benchmarks/overlap_stability.py --record benchmarks/records/overlap-stability

Near a minimum, along a direction of curvature h, the differences e between the workers' parameters and n between their
momenta (times the learning rate a) follow, for a momentum b and A = a (1 - b) h (for Adam h is divided by the root of
the second moment):

    awc    n <- b n + A e,   e <- W e - n            atc    n <- b n + A e,   e <- W (e - n)

All-reduce, and the workers' mean, are stable for A < 2 (1 + b). The table has the least A, in steps of 0.05, from which
differences grow over a period of the topology's rounds, and the spread: the RMS of e for gradients with independent
noise of size 1 / a, at A = 0. `mixing 0.5` replaces W by (I + W) / 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer import Layout
from gossamer.report.record import environment, write_record
from gossamer.topology import build

MOMENTUM = 0.9
LIMIT = 2 * (1 + MOMENTUM)
CURVATURES = np.arange(0.05, LIMIT, 0.05)
SETTINGS = [
    (name, per_node, how, mixing)
    for per_node in ((4, 4, 4, 4), (1, 1, 1, 1))
    for name in ("aer", "one-peer-exponential", "ring", "complete")
    for how, mixing in (("awc", 1.0), ("awc", 0.5), ("atc", 1.0))
]
Matrix = NDArray[np.float64]


def step(w: Matrix, curvature: float, how: str) -> tuple[Matrix, Matrix]:
    """One step of (e, n), and how it takes up the noise of the gradients."""
    own, mean = np.eye(len(w)), np.full_like(w, 1 / len(w))
    momentum, fresh = MOMENTUM * own, (1 - MOMENTUM) * (own - mean)
    if how == "awc":
        return np.block([[w - curvature * own, -momentum], [curvature * own, momentum]]), np.vstack([-fresh, fresh])
    moved = w * (1 - curvature)
    return np.block([[moved, -w @ momentum], [curvature * own, momentum]]), np.vstack([-w @ fresh, fresh])


def growth(rounds: Sequence[Matrix], curvature: float, how: str) -> float:
    """The factor per step by which differences grow in the long run."""
    n = len(rounds[0])
    product = np.kron(np.eye(2), np.eye(n) - 1 / n)
    for w in rounds:
        product = step(w, curvature, how)[0] @ product
    return float(np.abs(np.linalg.eigvals(product)).max() ** (1 / len(rounds)))


def spread(rounds: Sequence[Matrix], how: str, periods: int = 60) -> float:
    """The RMS difference of a worker to the mean, at no curvature, over the last period."""
    n = len(rounds[0])
    covariance, found = np.zeros((2 * n, 2 * n)), 0.0
    for period in range(periods):
        for w in rounds:
            move, noise = step(w, 0.0, how)
            covariance = move @ covariance @ move.T + noise @ noise.T
            if period == periods - 1:
                found += float(np.trace(covariance[:n, :n])) / n / len(rounds)
    return float(np.sqrt(max(found, 0.0)))


def measure(name: str, per_node: tuple[int, ...], how: str, mixing: float) -> dict[str, Any]:
    topology = build(name, Layout.of(per_node))
    own = np.eye(topology.n)
    rounds = [(1 - mixing) * own + mixing * np.asarray(topology.matrix(k)) for k in range(len(topology.rounds))]
    unstable = (float(a) for a in CURVATURES if growth(rounds, float(a), how) > 1.0001)
    return {
        "topology": name,
        "per_node": per_node,
        "how": how,
        "mixing": mixing,
        "unstable_from": next(unstable, None),
        "spread": spread(rounds, how),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write a record to this folder")
    args = parser.parse_args(argv)
    found = [measure(*setting) for setting in SETTINGS]
    lines = [
        f"Momentum {MOMENTUM}; all-reduce is stable to A = {LIMIT:g}.",
        "",
        "| replicas | topology | mixes | differences grow from A | spread |",
        "|---|---|---|---|---|",
    ]
    for r in found:
        replicas = f"{len(r['per_node'])} nodes of {r['per_node'][0]}" if r["per_node"][0] > 1 else "4"
        how = {"awc": "during the step (awc)", "atc": "after the step (atc)"}[r["how"]]
        how += f", mixing {r['mixing']:g}" if r["mixing"] != 1 else ""
        limit = f"{r['unstable_from']:.2f}" if r["unstable_from"] is not None else "nowhere"
        lines.append(f"| {replicas} | {r['topology']} | {how} | {limit} | {r['spread']:.3f} |")
    summary = "\n".join(lines)
    print(summary)
    if args.record:
        write_record(
            args.record, data={"momentum": MOMENTUM, "rows": found}, summary=summary, environment=environment()
        )


if __name__ == "__main__":
    main()
