"""Draw the settings of the record `predict-validation`: 44 clusters and the methods to predict and measure on each.

    python benchmarks/predict_settings.py            # writes benchmarks/records/predict-validation/settings.json

The list is drawn by one seed and committed before any number of the cost model is measured or fitted, so that no
setting can be chosen to suit the model. `benchmarks/predict_validation.py` reads the file and never draws.

Limits of a draw: an all-reduce takes 0.2 to 4 times the compute, so that methods differ; the workers' parameters over
the compute time stay below 200 MB/s, because more would saturate two cores with sleeping workers; real compute has at
most two workers. Every eighth setting or so has one node on loopback, every fifth real compute.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

SEED = 20261118
COUNT = 44
OUT = Path(__file__).parent / "records" / "predict-validation" / "settings.json"
LAYOUTS = [[1, 1], [2, 2], [4, 2], [2, 2, 2], [1, 1, 1, 1], [2, 1, 1], [2, 2, 2, 2], [3, 3], [4, 4], [2, 2, 1]]
RATES = [5, 10, 20, 50, 100, 200, 400, 600]  # Mbit/s
JITTERS = ["none", "none", "none", "lognormal:0.2", "lognormal:0.4", "slow-worker:2"]
TOPOLOGIES = ["aer", "one-peer-exponential", "ring", "complete", "base"]
WIRES = ["fp32", "fp32", "bf16", "fp16", "int8"]
LOOPBACK_SIZES = [1, 4, 16]  # MB
REAL_SIZES = {4: 16, 14: 260, 24: 64, 34: 130}  # MB, by index


def cluster(draw: random.Random, index: int) -> dict[str, Any]:
    """Draw layout, links, compute and model."""
    kind = "real" if index % 5 == 4 else "sleep"
    loopback = index in REAL_SIZES or (kind == "sleep" and index % 8 == 3)
    per_node = [1, 1] if kind == "real" else draw.choice(LAYOUTS)
    per_node = [sum(per_node)] if loopback else per_node
    workers = sum(per_node)
    rate = None if loopback or len(per_node) == 1 else draw.choice(RATES)
    compute = draw.choice([0.2, 0.4, 0.8] if kind == "real" else [0.2, 0.4, 0.8, 1.6])
    if rate is None:
        size = REAL_SIZES.get(index) or draw.choice([s for s in LOOPBACK_SIZES if s * workers <= 200 * compute] or [1])
    else:
        gamma = math.exp(draw.uniform(math.log(0.2), math.log(4)))
        size = gamma * compute * rate / 8 / (2 * (workers - 1) / workers)
        size = min(size, 200 * compute / workers)
    return {
        "per_node": per_node,
        "link_mbit": rate,
        "compute": compute,
        "compute_kind": kind,
        "jitter": "none" if kind == "real" else draw.choice(JITTERS),
        "model_mb": round(min(max(size, 1.0), 260.0), 1),
    }


def methods(draw: random.Random, where: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Draw DDP at two bucket sizes (or in bf16), and two ways to gossip."""
    mib = where["model_mb"] * 1e6 / 2**20
    rows = [row("ddp", bucket_mb=25.0)]
    rows.append(row("ddp:bf16", bucket_mb=25.0) if index % 4 == 1 else row("ddp", bucket_mb=round(mib / 4, 3)))
    several = len(where["per_node"]) > 1 and len(set(where["per_node"])) == 1 and where["per_node"][0] > 1
    while len(rows) < 4:
        topology = draw.choice(TOPOLOGIES)
        made = row(f"dadam:{topology}:{draw.choice(WIRES)}")
        extra = draw.choice(["none", "none", "every", "staleness", "inside", "inside"])
        if extra == "every":
            made["every"] = draw.choice([2, 4])
        elif extra == "staleness":
            made["staleness"] = draw.choice([1, 2])
        elif extra == "inside" and several:
            made["gradients"] = "node"
        if made not in rows:
            rows.append(made)
    return rows


def row(method: str, **options: Any) -> dict[str, Any]:
    return {"method": method, "bucket_mb": None, "every": 1, "staleness": 0, "gradients": "worker", **options}


def settings() -> list[dict[str, Any]]:
    draw = random.Random(SEED)
    made = []
    for index in range(COUNT):
        where = cluster(draw, index)
        made.append({"index": index, **where, "rows": methods(draw, where, index)})
    return made


def main() -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(s) for s in settings())
    OUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
