"""Pictures of timelines. Blue is compute, gray communication, red waiting.

Several traces are drawn one above the other on one time axis, so that a predicted timeline stands above the measured
one.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import InputError
from gossamer.report.html import live_figure, page
from gossamer.report.plots.style import (
    PICTURES_AND_PAGES,
    axes_box,
    check_output,
    inline_svg,
    new_figure,
    save,
    say,
    write_text,
)
from gossamer.trace import COLORS, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SPANS = 20_000  # more cannot be distinguished on a screen
MAX_PICTURE_ROWS = 64
MAX_ROWS = 2048
TALL, THIN = 0.62, 0.26  # heights of a worker's own bar and of the bar of its exchanges, which lies below
ROWS = {"other": (-TALL / 2, TALL / 2), "exchange": (TALL / 2, TALL / 2 + THIN)}


def draw_timeline(traces: Sequence[Trace], path: str | Path, *, title: str = "", unit: str | None = None) -> Path:
    """Draw timelines to `path`: .html, .svg, .png or .pdf. Times are seconds unless `unit` says otherwise."""
    path = check_output(path, PICTURES_AND_PAGES)
    if path.suffix.lower() == ".html":
        name = title or ", ".join(t.label for t in traces)
        parts = [f"<h1>{html.escape(name)}</h1>", timeline_figure(traces, unit=unit), timeline_note()]
        return write_text(path, page(name, parts))
    figure, _, _, _ = _figure(traces, unit, MAX_PICTURE_ROWS)
    say(figure, (f"{title}: " if title else "") + waiting_sentence(traces))
    return save(figure, path)


def waiting_sentence(traces: Sequence[Trace]) -> str:
    """Say which of the timelines waits least and most."""
    shares: dict[str, float] = {}
    for trace in traces:
        spans = [s for s in trace.spans if s.category != "exchange"]
        total = sum(s.seconds for s in spans)
        if total:
            shares[trace.label] = sum(s.seconds for s in spans if s.family == "waiting") / total
    if not shares:
        return "Gray bars are exchanges."
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    if len(shares) == 1 or shares[most] - shares[least] < 0.005:
        return f"Workers wait (red) {shares[most]:.0%} of the time; gray exchanges run beside blue compute."
    return f"Red is waiting: {most} waits {shares[most]:.0%} of the time, {least} {shares[least]:.0%}."


def timeline_figure(traces: Sequence[Trace], *, unit: str | None = None) -> str:
    """Return timelines as a part of a page: hovering names the span, dragging zooms."""
    figure, axes, name, scale = _figure(traces, unit, MAX_ROWS)
    drawn = inline_svg(figure, "timeline")
    described = [
        {
            "box": axes_box(figure, axis),
            "y": [round(v, 3) for v in reversed(axis.get_ylim())],
            "spans": [
                [
                    s.worker,
                    s.category,
                    float(f"{s.start * scale:.7g}"),
                    float(f"{s.end * scale:.7g}"),
                    "".join(f"\n{key} {value}" for key, value in s.attrs.items()),
                ]
                for s in trace.spans
            ],
        }
        for trace, axis in zip(traces, axes, strict=True)
    ]
    ends = list(axes[-1].get_xlim())
    data = {"kind": "timeline", "unit": name, "x": ends, "rows": ROWS, "axes": described}
    return live_figure(drawn, data, see=waiting_sentence(traces))


def timeline_note() -> str:
    """Return the sentence below a timeline in a page."""
    return (
        '<p class="note">Blue: compute. Gray: exchanges, which overlap it. Red: waiting. Point at a bar to read it, '
        "drag over a stretch of time to zoom in, double-click to see the whole.</p>"
    )


def _figure(traces: Sequence[Trace], unit: str | None, most_rows: int) -> tuple[Figure, list[Axes], str, float]:
    """Return the picture, its axes (one per trace), the name of the time unit, and units per second."""
    from matplotlib.patches import Patch

    if not traces or not any(t.spans for t in traces):
        raise InputError("there is nothing to draw: the trace has no spans; record some, e.g. with --trace-steps 8")
    count = sum(len(t.spans) for t in traces)
    if count > MAX_SPANS:
        raise InputError(f"{count} spans are too many to draw (at most {MAX_SPANS}); use fewer workers or steps")
    shown = [min(t.workers, most_rows) for t in traces]
    figure = new_figure(11, 1.1 + 0.3 * sum(shown) + 0.35 * len(traces))
    axes: list[Axes] = list(
        figure.subplots(len(traces), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": shown})[:, 0]
    )
    end = max(s.end for t in traces for s in t.spans)
    name, scale = (unit, 1.0) if unit else ("s", 1.0) if end >= 10 else ("ms", 1e3)
    for at, (trace, axis, rows) in enumerate(zip(traces, axes, shown, strict=True)):
        _draw_spans(axis, trace, rows, scale, f"spans-{at}")
        axis.set_ylim(rows - 0.3, -0.6)
        axis.set_yticks(range(rows), [f"node {trace.node[w]} · worker {w}" for w in range(rows)], fontsize=7)
        label = trace.label + (f" (first {rows} of {trace.workers} workers)" if rows < trace.workers else "")
        axis.set_title(label, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0, end * scale)
    axes[-1].set_xlabel(f"time ({name})")
    handles = [Patch(color=color, label=family) for family, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    return figure, axes, name, scale


def _draw_spans(axis: Axes, trace: Trace, rows: int, scale: float, gid: str) -> None:
    """Draw the spans of the first `rows` workers, all of one color as one path: files stay small and quick."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    boxes: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for s in trace.spans:
        if s.worker >= rows:
            continue
        exchange = s.category == "exchange"
        low, high = (s.worker + edge for edge in ROWS["exchange" if exchange else "other"])
        left, right = s.start * scale, s.end * scale
        corners = [(left, low), (right, low), (right, high), (left, high), (left, low)]
        boxes.setdefault((s.family, exchange), []).extend(corners)
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    for (family, exchange), corners in sorted(boxes.items()):
        outline = Outline(corners, codes * (len(corners) // 5))
        alpha = 0.75 if exchange else 1.0
        patch = PathPatch(outline, fc=COLORS[family], ec="white", lw=0.4, alpha=alpha, gid=f"{gid}-{family}")
        axis.add_patch(patch)
