"""Tables and pictures of the quality studies."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.report.plots.style import method_styles

Found = dict[str, Any]
Picture = Callable[[Path], None]
DIGITS = {"bleu": 2, "accuracy": 4, "loss": 4}
GREY = "#a3a7ad"
COLORS = ("#3b73b9", "#2a9d8f", "#e0a13c", "#7a5bb5", "#c44e52", "#74a9d8", "#1d3f6e", "#8c8c3a", "#b07aa1", "#59a14f")


def describe(study: str, found: Found) -> tuple[str, Picture]:
    return {"asynchronous": _asynchronous, "sensitivity": _sensitivity}[study](found)


def compact(found: Found) -> Found:
    """What the record keeps: a setting's configuration once, and its runs in short."""
    made = {}
    for name, got in found.items():
        config = {k: v for k, v in got["runs"][0]["config"].items() if k not in ("seed", "lr")}
        config["options"] = {k: v for k, v in config["options"].items() if k != "data"}
        made[name] = {"config": config, "lr": got["lr"], "runs": [short(r) for r in got["runs"]]}
    return made


def short(run: dict[str, Any]) -> dict[str, Any]:
    """A run with one line of curve instead of a line a number."""
    kept = {k: v for k, v in run.items() if k not in ("config", "curve", "evaluations")}
    kept["seed"], kept["lr"] = run["config"]["seed"], run["config"]["lr"]
    kept["training_loss_by_step"] = " ".join(f"{at}:{loss:.4g}" for at, loss in run["curve"][::3])
    kept["loss_and_spread_by_step"] = " ".join(f"{at}:{a:.4g}/{b:.4g}" for at, a, b in run["evaluations"])
    return kept


def figure_of(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def finals(got: Any, key: str) -> list[float]:
    return [r["final"][key] for r in got["runs"] if "final" in r]


def _sensitivity(found: Found) -> tuple[str, Picture]:
    """Rows by workers and optimizer, columns by learning rate."""
    grid: dict[str, dict[str, float]] = {}
    for name, got in found.items():
        row, _, rate = name.partition(" lr ")
        grid.setdefault(row, {})[rate] = statistics.mean(finals(got, "loss") or [float("nan")])
    rates = sorted({r for row in grid.values() for r in row}, key=float)
    seeds = max(len(g["runs"]) for g in found.values())
    first = next(iter(found.values()))["runs"][0]["config"]
    lines = [
        f"Language model, {first['steps']} steps, one-peer exponential gossip, the batch of all workers together "
        f"always 32 windows of 32 bytes; validation loss of the averaged model; seeds: {seeds}.",
        "",
        "| | " + " | ".join(f"lr {r}" for r in rates) + " | best |",
        "|---|" + "---|" * (len(rates) + 1),
    ]
    for row, cells in grid.items():
        lines.append(
            f"| {row} | "
            + " | ".join(f"{cells[r]:.3f}" if r in cells else "" for r in rates)
            + f" | {min(cells.values()):.3f} |"
        )
    return "\n".join([*lines, "", "![](plot.svg)"]), lambda path: _rates(grid, path)


def _rates(grid: dict[str, dict[str, float]], path: Path) -> None:
    plt = _pyplot()
    counts = sorted({row.split()[0] for row in grid}, key=lambda n: int(n[2:]))
    size = (4.6 * len(counts), 3.6)
    figure, grid_of_axes = plt.subplots(1, len(counts), figsize=size, sharey=True, layout="constrained", squeeze=False)
    axes = grid_of_axes[0]
    for axis, n in zip(axes, counts, strict=True):
        rows = [r for r in grid if r.startswith(f"{n} ") and len(grid[r]) > 1]
        for row, color in zip(rows, ("#555555", *COLORS), strict=False):
            rates = sorted(grid[row], key=float)
            label = row.removeprefix(f"{n} ")
            axis.plot([float(r) for r in rates], [grid[row][r] for r in rates], marker="o", label=label, color=color)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("peak learning rate")
        axis.set_title(f"{n[2:]} workers", fontsize=9)
    axes[0].set_ylabel("validation loss")
    axes[0].legend(fontsize=7, frameon=False)
    _save(plt, figure, path)


def stationary(run: dict[str, Any]) -> Any:
    """Root mean square of the consensus distance over the second half of the run."""
    half = run["config"]["steps"] / 2
    late = [spread for step, _, spread in run["evaluations"] if step > half]
    return statistics.fmean(s * s for s in late) ** 0.5


def _asynchronous(found: Found) -> tuple[str, Picture]:
    places = list(dict.fromkeys(re.sub(r" \S+$", "", name) for name in found))
    lines = [
        "Ring of virtual workers, a small residual network on digits, SGD without momentum, "
        "constant learning rate after a warm-up; `skewed` is dirichlet:0.1. Both methods make the very same "
        "exchanges (rate 1). Stationary consensus distance: RMS over the second half of the run.",
        "",
        "| workers, data | steps | lr | AD-PSGD | A2CiD2 | ratio | loss AD-PSGD | loss A2CiD2 | accuracy AD-PSGD "
        "| accuracy A2CiD2 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place in places:
        slow, fast = found.get(f"{place} ad-psgd:ring"), found.get(f"{place} a2cid2:ring")
        if not slow or not fast:
            continue
        a, b = [stationary(r) for r in slow["runs"]], [stationary(r) for r in fast["runs"]]
        ratio = [y / x for x, y in zip(a, b, strict=True)]
        row = [place, str(slow["runs"][0]["config"]["steps"]), f"{slow['lr']:g}"]
        row += [f"{statistics.mean(a):.3g}", f"{statistics.mean(b):.3g}", figure_of(ratio, 3)]
        row += [figure_of(finals(g, "loss"), 3) for g in (slow, fast)]
        row += [figure_of(finals(g, "accuracy"), 3) for g in (slow, fast)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, "", "![](plot.svg)"]), lambda path: _spreads(found, places, path)


def _spreads(found: Found, places: list[str], path: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(places), figsize=(3.2 * len(places), 3.2), layout="constrained", squeeze=False)
    for axis, place in zip(axes[0], places, strict=True):
        for method, style in method_styles(["ad-psgd", "a2cid2"]).items():
            color = style.color
            got = found.get(f"{place} {method}:ring")
            for run in got["runs"] if got else []:
                axis.plot(
                    [e[0] for e in run["evaluations"]], [e[2] for e in run["evaluations"]], color=color, alpha=0.6
                )
            axis.plot([], [], color=color, label=method)
        axis.set_title(place, fontsize=9)
        axis.set_xlabel("steps a worker")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("consensus distance")
    axes[0][0].legend(frameon=False, fontsize=8)
    _save(plt, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    for axis in figure.axes:
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
