"""Draw how far gossip's loss is from all-reduce's, with intervals, from the paired records: docs/images/quality.svg.

python benchmarks/quality_picture.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from scipy.stats import t

from gossamer.report.plots.style import INK, METHOD_COLORS

ROOT = Path(__file__).parents[1]
TASKS = {
    "translate": "translation",
    "lm": "language model",
    "vision": "Fashion-MNIST",
    "german": "German, kept out of every choice",
}
LOOKS = (("gossipadam", "o"), ("dadam", "s"), ("accumadam", "D"), ("ad-psgd", "^"))  # colors and marks of the tasks
SETTINGS = {
    "gossipadam:exp inside": "exact inside nodes,\nexponential graph between",
    "gossipadam:aer inside": "exact inside nodes,\naer between (the default)",
    "gossipadam:aer": "all 16 workers gossip,\naer",
}


def difference(task: str, setting: str) -> tuple[float, float]:
    """Return the mean difference of the loss to all-reduce, paired by seed, and half of its 95 % interval."""
    results = json.loads((ROOT / f"benchmarks/records/quality-signal-{task}/record.json").read_text())["results"]
    loss = {
        name: {r["seed"]: r["final"]["loss"] for r in results[name]["runs"]} for name in ("all-reduce, Adam", setting)
    }
    base, other = loss.values()
    gaps = [other[seed] - base[seed] for seed in other if seed in base]
    half = float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return statistics.mean(gaps), half


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "gossamer", "font.size": 10, "text.color": INK})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
    for row, setting in enumerate(SETTINGS):
        for at, (task, (name, mark)) in enumerate(zip(TASKS, LOOKS, strict=True)):
            mean, half = difference(task, setting)
            place = len(SETTINGS) - 1 - row + 0.18 * (1.5 - at)
            label = TASKS[task] if row == 0 else None
            axes.errorbar(mean, place, xerr=half, fmt=mark, color=METHOD_COLORS[name], capsize=3, label=label)
    axes.axvline(0, color=METHOD_COLORS["ddp"])
    axes.text(0.002, len(SETTINGS) - 0.5, "all-reduce", color=INK, fontsize=9)
    axes.set_yticks(range(len(SETTINGS)), list(SETTINGS.values())[::-1])
    axes.set_ylim(-0.5, len(SETTINGS) - 0.3)
    axes.set_xlabel("loss minus all-reduce's, with 95 % interval")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(ROOT / "docs/images/quality.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
