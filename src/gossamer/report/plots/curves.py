"""Pictures with curves: runs, predictions and the consensus study."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.report.html import live_figure
from gossamer.report.plots.style import (
    INK,
    MethodStyle,
    axes_box,
    check_output,
    inline_svg,
    method_styles,
    new_figure,
    save,
    say,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossamer.predict.asynchronous import ConsensusCurve, ConsensusScaling
    from gossamer.predict.closed_form import Contour

POINTS = 250  # of a curve of the consensus study; more cannot be seen
LOG_RANGE = 8.0  # ratio of the largest to the smallest value from which an axis is logarithmic
FORCINGS = {
    "none": "averaging white values",
    "noise": "independent noise in each step",
    "constant": "constant forcing, different workers",
    "quadratic": "descent on different quadratics",
}

Points = Sequence[tuple[float, float]]


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float, float]]],
    *,
    title: str,
    unit: str,
    see: str = "",
    log_allowed: bool = False,
) -> str:
    """Return a chart as a part of a page; `lines` has (x, mean, standard deviation) for each label.

    `see` is the sentence above it. With `log_allowed`, values over a wide range are drawn on a logarithmic axis.
    Lines are dashed differently and get thinner from first to last, so that equal curves do not hide each other.
    The legend is not part of the chart: `legend` makes one for all charts of a page.
    """
    figure = new_figure(5.4, 3.1)
    axis = figure.subplots()
    styles = method_styles(list(lines))
    means = [y for points in lines.values() for _, y, _ in points if math.isfinite(y)]
    positive = [y for y in means if y > 0]
    wide = bool(positive) and max(positive) > LOG_RANGE * min(positive)
    logarithmic = log_allowed and wide and min(means) >= 0
    hidden = []
    for at, (label, points) in enumerate(lines.items()):
        style = styles[label]
        x, y, deviation = np.array(points, dtype=float).reshape(-1, 3).T
        if logarithmic and len(y) and not np.any(y > 0):
            hidden.append(label)
        if np.any(deviation > 0):
            low = np.maximum(y - deviation, min(positive)) if logarithmic else y - deviation
            axis.fill_between(x, low, y + deviation, color=style.color, alpha=0.15, linewidth=0)
        marker = style.marker if len(x) <= 12 else ""
        axis.plot(
            x, y, color=style.color, dashes=style.dash or (None, None), marker=marker, markersize=4,
            linewidth=thickness(at, len(lines)), gid=f"line-{at}",
        )  # fmt: skip
    if logarithmic:
        axis.set_yscale("log")
    axis.set_xlabel("step" if unit == "step" else f"time ({unit})")
    axis.set_xlim(left=0)
    tidy(axis)
    drawn = inline_svg(figure, title)
    data = {
        "kind": "lines",
        "unit": unit,
        "x": list(axis.get_xlim()),
        "box": axes_box(figure, axis),
        "lines": [{"label": label, "points": _rounded(points)} for label, points in lines.items()],
    }
    zero = f"; 0 for {', '.join(hidden)}" if hidden else ""
    caption = f"{title} (logarithmic{zero})" if logarithmic else title
    return live_figure(drawn, data, caption, see)


def thickness(at: int, count: int) -> float:
    """Return the width of line `at`: later lines are thinner, so that equal curves do not hide each other."""
    return 1.3 + 1.2 * (1 - at / count)


def ends_sentence(
    lines: Mapping[str, Sequence[tuple[float, float, float]]], unit: str, *, higher: bool, distance: bool = False
) -> str:
    """Say which line ends best, and where DDP ends; for the consensus distance which ends lowest."""
    ends = {label: points[-1][:2] for label, points in lines.items() if points and math.isfinite(points[-1][1])}
    if distance:  # all-reduce has none
        ends = {label: end for label, end in ends.items() if end[1] > 0}
    if not ends:
        return "All workers hold the same parameters." if distance else "No value is known."
    sign = -1 if higher else 1
    best = min(ends, key=lambda label: sign * ends[label][1])
    text = (
        f"{best} ends {'closest together' if distance else 'highest' if higher else 'lowest'}, at {ends[best][1]:.4g}"
    )
    if unit != "step":
        text += f" after {ends[best][0]:.4g} {unit}"
    if "ddp" in ends and best != "ddp":
        text += f"; ddp at {ends['ddp'][1]:.4g}" + (f" after {ends['ddp'][0]:.4g} {unit}" if unit != "step" else "")
    return f"{text}."


def _rounded(points: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Return x and mean of the points whose mean is a finite number, which JSON can hold."""
    return [[float(f"{x:.6g}"), float(f"{y:.6g}")] for x, y, _ in points if math.isfinite(y)]


def legend(labels: Sequence[str]) -> str:
    """Return one legend for all charts of a page."""
    items = [f"<li>{_sample(style)}{html.escape(label)}</li>" for label, style in method_styles(labels).items()]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _sample(style: MethodStyle) -> str:
    dashes = f' stroke-dasharray="{" ".join(f"{2 * d:g}" for d in style.dash)}"' if style.dash else ""
    line = f'<line x1="0" x2="34" y1="6" y2="6" stroke="{style.color}" stroke-width="3"{dashes}/>'
    return f'<svg viewBox="0 0 34 12">{line}</svg>'


def draw_loss(curves: Mapping[str, Points], path: str | Path, *, target: float) -> Path:
    """Draw loss against wall time, one line per method; the dotted line is the loss whose time is compared."""
    path = check_output(path)
    figure = new_figure(7.6, 3.8)
    axis = figure.subplots()
    _method_lines(figure, axis, curves, marker=False)
    axis.axhline(target, color=INK, linestyle="dotted", linewidth=1)
    axis.set(xlabel="wall time (s)", ylabel="loss, mean over workers")
    axis.set_xlim(left=0)
    values = [y for points in curves.values() for _, y in points if y > 0]
    if values and max(values) > LOG_RANGE * min(values):
        axis.set_yscale("log")
    reached = {label: next((x for x, y in points if y <= target), None) for label, points in curves.items()}
    times = {label: x for label, x in reached.items() if x is not None}
    if times:
        first = min(times, key=times.__getitem__)
        ddp = times.get("ddp")
        than = f", {ddp / times[first]:.2g} times sooner than ddp" if ddp and first != "ddp" and times[first] else ""
        say(figure, f"{first} reaches the dotted loss of {target:.4g} first, after {times[first]:.4g} s{than}.")
    return save(figure, path)


def draw_scaling(curves: Mapping[str, Points], path: str | Path, *, unit: str = "s") -> Path:
    """Draw step time against the number of workers, one line per method."""
    path = check_output(path)
    figure = new_figure(7.6, 4)
    axis = figure.subplots()
    _method_lines(figure, axis, curves, marker=True)
    axis.set_xscale("log", base=2)
    sizes = sorted({n for points in curves.values() for n, _ in points})
    axis.set_xticks(sizes, [f"{n:g}" for n in sizes])
    axis.set_ylim(bottom=0)
    axis.set(xlabel="workers", ylabel=f"step time ({unit})")
    largest = {label: dict(points)[sizes[-1]] for label, points in curves.items() if sizes[-1] in dict(points)}
    if largest:
        best = min(largest, key=largest.__getitem__)
        ddp = largest.get("ddp")
        against = f", {largest[best] / ddp:.0%} of ddp's" if ddp and best != "ddp" else ""
        say(
            figure,
            f"With {sizes[-1]:g} workers {best} has the shortest steps: {largest[best]:.3g} {unit}{against}. A flat "
            "line scales perfectly.",
        )
    return save(figure, path)


def _method_lines(figure: Figure, axis: Axes, curves: Mapping[str, Points], *, marker: bool) -> None:
    for at, (label, style) in enumerate(method_styles(list(curves)).items()):
        axis.plot(
            *zip(*curves[label], strict=True), label=label, color=style.color, dashes=style.dash or (None, None),
            marker=style.marker if marker else "", linewidth=thickness(at, len(curves)),
        )  # fmt: skip
    tidy(axis)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)


def draw_contours(contours: Sequence[Contour], path: str | Path, *, title: str = "") -> Path:
    """Draw the time saved over all-reduce, one panel per σ.

    γ is the time of an all-reduce over the compute time of a step, ω the time of an exchange over that of an
    all-reduce, σ the relative standard deviation of compute times.
    """
    path = check_output(path)
    figure = new_figure(3.6 * len(contours) + 1, 3.6)
    axes = figure.subplots(1, len(contours), squeeze=False, sharey=True)[0]
    levels = np.linspace(0, 0.8, 17)
    for c, axis in zip(contours, axes, strict=True):
        saving = np.array(c.saving)
        filled = axis.contourf(c.gamma, c.omega, saving, levels=levels, cmap="Blues", extend="both")
        axis.contour(c.gamma, c.omega, saving, levels=levels[::4], colors="black", linewidths=0.5)
        axis.set_title(f"σ = {c.sigma:g}", fontsize=9)
        axis.set_xlabel("γ: all-reduce / compute")
    axes[0].set_ylabel("ω: exchange / all-reduce")
    bar = figure.colorbar(filled, ax=axes.tolist(), format=lambda v, _: f"{v:.0%}", ticks=levels[::4])
    bar.set_label("time saved over all-reduce (a line every 20%)")
    most = max(float(np.max(c.saving)) for c in contours)
    head = f"{title}: " if title else ""
    say(
        figure,
        f"{head}the darker, the more time gossip saves (up to {most:.0%} here): it pays where all-reduce takes long "
        "beside compute (right), where an exchange is short beside an all-reduce (below), and with jitter (panels).",
    )
    return save(figure, path)


def draw_consensus(
    curves: Mapping[str, Sequence[ConsensusCurve]],
    scalings: Sequence[ConsensusScaling],
    path: str | Path,
    *,
    title: str,
    workers: int,
) -> Path:
    """Draw the consensus study: one panel per forcing, the loss where there is one, and the scaling if any."""
    path = check_output(path)
    losses = [c for c in curves.get("quadratic", ()) if c.loss is not None]
    panels = len(curves) + bool(losses) + bool(scalings)
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = new_figure(4.4 * columns, 3.6 * rows + 0.4)
    say(figure, f"{title}: {_consensus_sentence(curves, scalings)}")
    axes = iter(figure.subplots(rows, columns, squeeze=False).ravel())
    for forcing, pair in curves.items():
        axis = next(axes)
        for curve in pair:
            skip = 0 if forcing == "none" else 1  # forced runs start at consensus, which a logarithm cannot show
            _study_line(axis, curve, curve.communications[skip:] / workers, curve.distance[skip:])
        axis.set_yscale("log")
        axis.set(title=FORCINGS[forcing], xlabel="exchanges per worker", ylabel="consensus distance")
        axis.legend(frameon=False)
    if losses:
        axis = next(axes)
        for curve in losses:
            assert curve.loss is not None
            _study_line(axis, curve, curve.communications / workers, curve.loss)
        axis.set(title="the same: loss", xlabel="exchanges per worker", ylabel="mean of |x - x*|² / 2")
        axis.legend(frameon=False)
    if scalings:
        _scaling_panel(next(axes), scalings)
    for axis in axes:
        axis.set_visible(False)
    return save(figure, path)


def _consensus_sentence(curves: Mapping[str, Sequence[ConsensusCurve]], scalings: Sequence[ConsensusScaling]) -> str:
    lower = "the lower curve keeps the workers closer together for the same number of exchanges"
    pair = next((p for p in curves.values() if len(p) > 1), None)
    if pair is not None:
        forcing = next(name for name, p in curves.items() if p is pair)
        best = min(pair, key=lambda c: float(np.mean(c.distance[-max(1, len(c.distance) // 5) :])))
        return f"{best.algorithm} ends closer to consensus ({FORCINGS[forcing]}); {lower}."
    if scalings:
        return "the flatter line needs fewer exchanges as workers are added."
    return f"{lower}."


def _study_line(axis: Axes, curve: ConsensusCurve, x: np.ndarray, y: np.ndarray) -> None:
    every = max(1, len(x) // POINTS)
    color = method_styles([curve.algorithm])[curve.algorithm].color
    axis.plot(x[::every], y[::every], color=color, label=curve.algorithm, lw=1.4)
    tidy(axis)


def _scaling_panel(axis: Axes, scalings: Sequence[ConsensusScaling]) -> None:
    for s in scalings:
        style = method_styles([s.algorithm])[s.algorithm]
        label = f"{s.algorithm}: n^{s.exponent:.2f}"
        axis.loglog(s.workers, s.communications, "o-", color=style.color, label=label, lw=1.4)
    axis.set(
        title=f"exchanges until {scalings[0].epsilon:g} of the slowest mode",
        xlabel="workers",
        ylabel="exchanges in all",
    )
    ticks = scalings[0].workers
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.minorticks_off()
    tidy(axis)
    axis.legend(frameon=False)
