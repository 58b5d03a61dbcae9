"""Pictures of the asynchronous consensus study: distance over communications, and communications over workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.predict.consensus import Curve, Scaling

POINTS = 250  # of a line: more cannot be seen
COLORS = {"ad-psgd": "#57606a", "a2cid2": "#0969da"}
TITLES = {
    "none": "averaging white values",
    "noise": "i.i.d. noise each step",
    "constant": "constant forcing, different workers",
    "quadratic": "descent on different quadratics",
}


def draw(
    curves: Mapping[str, Sequence[Curve]], scalings: Sequence[Scaling], path: str | Path, *, title: str, workers: int
) -> Path:
    """One panel for each forcing (and the loss where there is one), one for the scaling if any."""
    path = Path(path)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InputError(f"cannot draw to {str(path)!r}; name a file that ends in .svg, .png or .pdf")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = [c for c in curves.get("quadratic", ()) if c.loss is not None]
    panels = len(curves) + bool(losses) + bool(scalings)
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows + 0.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontweight="bold")
    axes = iter(figure.subplots(rows, columns, squeeze=False).ravel())
    for forcing, pair in curves.items():
        axis = next(axes)
        for curve in pair:
            skip = 0 if forcing == "none" else 1  # forced runs start at consensus
            _line(axis, curve, curve.communications[skip:] / workers, curve.distance[skip:])
        axis.set_yscale("log")
        axis.set(title=TITLES[forcing], xlabel="exchanges over workers", ylabel="consensus distance")
        axis.legend(frameon=False)
    if losses:
        axis = next(axes)
        for curve in losses:
            assert curve.loss is not None
            _line(axis, curve, curve.communications / workers, curve.loss)
        axis.set(title="the same: loss", xlabel="exchanges over workers", ylabel="mean of |x - x*|² / 2")
        axis.legend(frameon=False)
    if scalings:
        _scaling(next(axes), scalings)
    for axis in axes:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _line(axis: Any, curve: Curve, x: Any, y: Any) -> None:
    every = max(1, len(x) // POINTS)
    axis.plot(x[::every], y[::every], color=COLORS[curve.algorithm], label=curve.algorithm, lw=1.4)
    axis.grid(alpha=0.25)


def _scaling(axis: Any, scalings: Sequence[Scaling]) -> None:
    for s in scalings:
        label = f"{s.algorithm}: n^{s.exponent:.2f}"
        axis.loglog(s.workers, s.communications, "o-", color=COLORS[s.algorithm], label=label, lw=1.4)
    axis.set(
        title=f"exchanges until {scalings[0].epsilon:g} of the slowest mode",
        xlabel="workers",
        ylabel="exchanges in all",
    )
    ticks = scalings[0].workers
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
