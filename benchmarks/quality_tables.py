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


def describe(study: str, metric: str, found: Found) -> tuple[str, Picture]:
    made = {"asynchronous": _asynchronous, "sensitivity": _sensitivity, "lm": _lm}.get(study)
    return made(found) if made else _quality(metric, found)


def compact(found: Found) -> Found:
    """What the record keeps of each run: one line of curve instead of a line a number."""

    def short(run: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in run.items() if k not in ("config", "curve", "evaluations")}
        kept["seed"], kept["lr"] = run["config"]["seed"], run["config"]["lr"]
        kept["training_loss_by_step"] = " ".join(f"{at}:{loss:.4g}" for at, loss in run["curve"][::3])
        kept["loss_and_spread_by_step"] = " ".join(f"{at}:{a:.4g}/{b:.4g}" for at, a, b in run["evaluations"])
        return kept

    made = {}
    for name, got in found.items():
        config = {k: v for k, v in got["runs"][0]["config"].items() if k not in ("seed", "lr")}
        config["options"] = {k: v for k, v in config["options"].items() if k != "data"}
        others = [short(r) for rate, r in got["trials"].items() if float(rate) != got["lr"]]
        made[name] = {
            "config": config,
            "lr": got["lr"],
            "runs": [short(r) for r in got["runs"]],
            "other_trials": others,
        }
    return made


def figure_of(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _finals(got: Any, key: str) -> list[float]:
    return [r["final"][key] for r in got["runs"] if "final" in r]


def _trials(got: Any, key: str = "loss") -> str:
    parts = []
    for rate, made in got["trials"].items():
        text = f"{made['final'][key]:.3f}" if "final" in made else "diverged"
        parts.append(f"{float(rate):.3g}: **{text}**" if float(rate) == got["lr"] else f"{float(rate):.3g}: {text}")
    return ", ".join(parts)


def _edge(got: Any) -> str:
    rates = [float(r) for r in got["trials"]]
    return " (edge)" if len(rates) > 1 and got["lr"] in (min(rates), max(rates)) else ""


def _table(metric: str, found: Found) -> list[str]:
    extra = metric != "loss"
    head = ["setting", "lr", *([metric] if extra else []), "loss", "spread", "ms a step on a40"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, got in found.items():
        runs = [r for r in got["runs"] if "final" in r]
        if not runs:
            continue
        row = [name, f"{got['lr']:.3g}{_edge(got)}"]
        row += [figure_of(_finals(got, metric), DIGITS[metric])] if extra else []
        row += [figure_of(_finals(got, "loss"), 3)]
        row += [f"{statistics.mean(r['spread'] for r in runs):.3g}", f"{1e3 * runs[0]['step_seconds']:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _settings(found: Found) -> str:
    first = next(iter(found.values()))["runs"][0]
    config, options = first["config"], first["config"]["options"]
    said = ", ".join(f"{k} {v}" for k, v in options.items() if k not in ("data",))
    return (
        f"{sum(config['per_node'])} virtual workers on nodes of {config['per_node'][0]}, {config['steps']} steps, "
        f"{first['parameters']:,} parameters, Adam betas {config['betas']}, s = {config['accumulate']} with betas per "
        f"{config['betas_per']}, {config['schedule']} schedule, {said}. `inside`: gradients averaged exactly inside a "
        "node, gossip between the four nodes. Loss and metric are those of the averaged model at the end; `spread` is "
        "the consensus distance. Mean ± standard deviation over "
        f"{max(len(g['runs']) for g in found.values())} seeds, the first of which also chose the rate."
    )


def verdict(metric: str, found: Found) -> str:
    """The best gossip beside all-reduce, in one sentence a measure."""
    said = []
    for key, sign in ((metric, -1 if metric == "loss" else 1), ("loss", -1)):
        base = _finals(found["ddp"], key)
        others = {n: _finals(g, key) for n, g in found.items() if n != "ddp" and "," not in n}
        name = max(others, key=lambda n: sign * statistics.mean(others[n]))
        gap = sign * (statistics.mean(others[name]) - statistics.mean(base))
        limit = max(statistics.stdev(base), statistics.stdev(others[name])) if len(base) > 1 else 0.0
        word = "within one standard deviation" if abs(gap) <= limit else "better" if gap > 0 else "WORSE"
        said.append(
            f"Best {key} of gossip: {name}, {figure_of(others[name], DIGITS[key])}; all-reduce "
            f"{figure_of(base, DIGITS[key])}: {word}."
        )
        if key == "loss" and metric == "loss":
            return said[0]
    return " ".join(said)


def _quality(metric: str, found: Found) -> tuple[str, Picture]:
    lines = [_settings(found), "", verdict(metric, found), "", *_table(metric, found), "", "![](plot.svg)", ""]
    lines += ["Loss at the rates that were tried (first seed):", "", "| setting | rate: loss |", "|---|---|"]
    lines += [f"| {name} | {_trials(got)} |" for name, got in found.items()]
    return "\n".join(lines), lambda path: _dots(metric, found, path)


def _dots(metric: str, found: Found, path: Path) -> None:
    """A dot a run, a bar a mean; the band is all-reduce's mean ± standard deviation."""
    plt = _pyplot()
    names = [n for n, g in found.items() if _finals(g, metric)]
    figure, axis = plt.subplots(figsize=(7.0, 0.9 + 0.27 * len(names)), layout="constrained")
    base = _finals(found["ddp"], metric)
    mean, spread = statistics.mean(base), statistics.stdev(base) if len(base) > 1 else 0.0
    axis.axvspan(mean - spread, mean + spread, color=GREY, alpha=0.35, linewidth=0)
    axis.axvline(mean, color=GREY)
    for at, name in enumerate(names):
        values = _finals(found[name], metric)
        color = method_styles([name])[name].color
        axis.plot(values, [at] * len(values), "o", color=color, markersize=4, alpha=0.7)
        axis.plot([statistics.mean(values)], [at], "|", color=color, markersize=14, markeredgewidth=2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"{metric} of the averaged model (band: all-reduce ± one standard deviation)", fontsize=8)
    _save(plt, figure, path)


def _lm(found: Found) -> tuple[str, Picture]:
    base = found["ddp"]
    target = statistics.mean(_finals(base, "loss"))
    whole = base["runs"][0]["config"]["steps"] * base["runs"][0]["step_seconds"]
    lines = [_settings(found), "", verdict("loss", found), "", *_table("loss", found), ""]
    lines += [f"All-reduce's final validation loss, {target:.4f}, takes it {whole:.1f} s on the a40 preset.", ""]
    lines += ["| setting | steps | loss | seconds in all | share of all-reduce's time | reaches its loss |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, got in found.items():
        steps = got["runs"][0]["config"]["steps"]
        took = steps * got["runs"][0]["step_seconds"]
        values = _finals(got, "loss")
        reached = sum(v <= target for v in values)
        lines.append(
            f"| {name} | {steps} | {figure_of(values, 4)} | {took:.1f} | {took / whole:.0%} "
            f"| mean {'yes' if statistics.mean(values) <= target else 'no'}, {reached} of {len(values)} seeds |"
        )
    lines += ["", "![](plot.svg)", "", "(The last point of a curve is on all validation data, earlier ones on a part.)"]
    lines += ["", "Loss at the rates that were tried (first seed):", ""]
    lines += ["| setting | rate: loss |", "|---|---|", *(f"| {n} | {_trials(g)} |" for n, g in found.items())]
    return "\n".join(lines), lambda path: _curves(found, target, path)


def _curves(found: Found, target: float, path: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), sharey=True, layout="constrained")
    styles = method_styles(list(found))
    for name, got in found.items():
        color, dashes = styles[name].color, styles[name].dash or (None, None)
        seconds = got["runs"][0]["step_seconds"]
        points = list(zip(*[r["evaluations"] for r in got["runs"]], strict=True))
        steps = [p[0][0] for p in points]
        mean = [statistics.mean(e[1] for e in p) for p in points]
        axes[0].plot(steps, mean, marker=".", label=name, color=color, dashes=dashes, linewidth=1.4)
        axes[1].plot([s * seconds for s in steps], mean, marker=".", color=color, dashes=dashes, linewidth=1.4)
    for axis, label in zip(axes, ("steps", "simulated seconds on 4 x 4 A40"), strict=True):
        axis.axhline(target, color="#333333", linestyle="dotted", linewidth=1)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("validation loss of the averaged model")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    _save(plt, figure, path)


def _sensitivity(found: Found) -> tuple[str, Picture]:
    """Rows by workers and optimizer, columns by learning rate."""
    grid: dict[str, dict[str, float]] = {}
    for name, got in found.items():
        row, _, rate = name.partition(" lr ")
        grid.setdefault(row, {})[rate] = statistics.mean(_finals(got, "loss") or [float("nan")])
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
    figure, axes = plt.subplots(1, len(counts), figsize=(4.6 * len(counts), 3.6), sharey=True, layout="constrained")
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
        row += [figure_of(_finals(g, "loss"), 3) for g in (slow, fast)]
        row += [figure_of(_finals(g, "accuracy"), 3) for g in (slow, fast)]
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
