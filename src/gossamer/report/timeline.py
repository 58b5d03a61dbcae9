"""Pictures of timelines and predictions: SVG or PNG by matplotlib, self-contained HTML by plotly.

Blue is compute, grey communication, red waiting. Several traces are drawn one above the other on one time axis, so
that a predicted timeline stands above the measured one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError
from gossamer.trace import COLORS, Span, Trace

if TYPE_CHECKING:
    from gossamer.predict.closed_form import Contour

MAX_SPANS = 20_000  # more than this cannot be told apart on a screen, and browsers choke
MAX_PICTURE_ROWS = 64
PICTURES = (".svg", ".png", ".pdf")
TALL, THIN = 0.62, 0.26  # heights of a worker's own bar and of its exchanges' bar


def draw(traces: Sequence[Trace], path: str | Path, *, title: str = "", unit: str | None = None) -> Path:
    """Write the timelines to `path`: .html, .svg, .png or .pdf. Times are seconds unless `unit` says otherwise."""
    path = Path(path)
    if not traces or not any(t.spans for t in traces):
        raise InputError("there is nothing to draw: the trace has no spans; ask for some, e.g. --trace-steps 8")
    count = sum(len(t.spans) for t in traces)
    if count > MAX_SPANS:
        raise InputError(f"{count} spans are too many to draw (at most {MAX_SPANS}); use fewer workers or steps")
    with _writing(path, (".html", *PICTURES)):
        (_html if path.suffix == ".html" else _picture)(traces, path, title, unit)
    return path


@contextmanager
def _writing(path: Path, endings: Sequence[str]) -> Iterator[None]:
    """Refuses other file names, makes the folder, and turns what goes wrong with the file into a sentence."""
    if path.suffix not in endings:
        known = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise InputError(f"cannot draw to {str(path)!r}; name a file that ends in {known}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another place") from None


def _unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 10 else ("ms", 1e3)


def _place(span: Span, row: float) -> tuple[float, float]:
    """Center and height of a span's bar; exchanges lie below their worker's compute."""
    if span.category == "exchange":
        return row + (TALL + THIN) / 2, THIN
    return row, TALL


def _picture(traces: Sequence[Trace], path: Path, title: str, unit: str | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = sum(min(t.workers, MAX_PICTURE_ROWS) for t in traces)
    figure, axes = plt.subplots(
        len(traces),
        1,
        sharex=True,
        squeeze=False,
        figsize=(11, 1.3 + 0.3 * rows + 0.4 * len(traces)),
        gridspec_kw={"height_ratios": [min(t.workers, MAX_PICTURE_ROWS) for t in traces]},
    )
    end = max(s.end for t in traces for s in t.spans)
    name, scale = (unit, 1.0) if unit else _unit(end)
    for trace, axis in zip(traces, axes[:, 0], strict=True):
        shown = min(trace.workers, MAX_PICTURE_ROWS)
        bars: dict[tuple[str, int, bool], list[tuple[float, float]]] = {}
        for s in trace.spans:
            if s.worker < shown:
                bars.setdefault((s.family, s.worker, s.category == "exchange"), []).append(
                    (s.start * scale, s.seconds * scale)
                )
        for (family, worker, thin), intervals in bars.items():
            center, height = (worker + (TALL + THIN) / 2, THIN) if thin else (worker, TALL)
            axis.broken_barh(
                intervals,
                (center - height / 2, height),
                facecolors=COLORS[family],
                edgecolors="white",
                linewidth=0.4,
                alpha=0.75 if thin else 1.0,
            )
        axis.set_ylim(shown - 0.3, -0.6)
        axis.set_yticks(range(shown))
        axis.set_yticklabels([f"node {trace.node[w]}  worker {w}" for w in range(shown)], fontsize=7)
        label = trace.label + (f" (first {shown} of {trace.workers} workers)" if shown < trace.workers else "")
        axis.set_title(label, fontsize=9, loc="left")
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    axes[-1, 0].set_xlim(0, end * scale)
    axes[-1, 0].set_xlabel(f"time ({name})")
    figure.legend(
        handles=[Patch(color=c, label=f) for f, c in COLORS.items()],
        loc="upper right",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    if title:
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _html(traces: Sequence[Trace], path: Path, title: str, unit: str | None) -> None:
    import plotly.graph_objects as go

    end = max(s.end for t in traces for s in t.spans)
    name, scale = (unit, 1.0) if unit else _unit(end)
    bars: dict[tuple[str, bool], dict[str, list[Any]]] = {}
    ticks: list[tuple[float, str]] = []
    headings: list[tuple[float, str]] = []
    base = 0.0
    for trace in traces:
        headings.append((base, trace.label))
        ticks += [(base + 1 + w, f"node {trace.node[w]} · worker {w}") for w in range(trace.workers)]
        for s in trace.spans:
            center, height = _place(s, base + 1 + s.worker)
            b = bars.setdefault(
                (s.family, s.category == "exchange"), {k: [] for k in ("x", "base", "y", "width", "text")}
            )
            b["x"].append(s.seconds * scale)
            b["base"].append(s.start * scale)
            b["y"].append(center)
            b["width"].append(height)
            detail = "".join(f"<br>{k} {v}" for k, v in s.attrs.items())
            b["text"].append(f"worker {s.worker}: {s.category}, {s.seconds * scale:.4g} {name}{detail}")
        base += trace.workers + 1.4
    figure = go.Figure()
    for (family, thin), b in sorted(bars.items()):
        figure.add_bar(
            orientation="h",
            x=b["x"],
            base=b["base"],
            y=b["y"],
            width=b["width"],
            hovertext=b["text"],
            hoverinfo="text",
            name=family,
            marker={
                "color": COLORS[family],
                "line": {"color": "white", "width": 0.5},
                "opacity": 0.75 if thin else 1.0,
            },
        )
    for at, label in headings:
        figure.add_annotation(
            x=0, xref="paper", y=at + 0.15, yref="y", text=f"<b>{label}</b>", showarrow=False, xanchor="left"
        )
    figure.update_layout(
        title=title or None,
        barmode="overlay",
        plot_bgcolor="white",
        height=int(150 + 30 * base),
        margin={"l": 130, "r": 20, "t": 80 if title else 40, "b": 50},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        dragmode="zoom",
    )
    figure.update_xaxes(title=f"time ({name})", range=[0, end * scale], gridcolor="#eeeeee")
    figure.update_yaxes(
        tickvals=[t for t, _ in ticks],
        ticktext=[t for _, t in ticks],
        range=[base, -0.4],
        zeroline=False,
        ticksuffix="  ",
    )
    # the script stands in the page itself: it opens without a network
    figure.write_html(path, include_plotlyjs=True, full_html=True, config={"displaylogo": False, "scrollZoom": True})


def draw_contours(contours: Sequence[Contour], path: str | Path, *, title: str = "") -> Path:
    """Saving over all-reduce against γ and ω, one panel a σ."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    path = Path(path)
    figure, axes = plt.subplots(
        1, len(contours), squeeze=False, sharey=True, figsize=(3.6 * len(contours) + 1, 3.6), layout="constrained"
    )
    levels = np.linspace(0, 0.8, 17)
    for c, axis in zip(contours, axes[0], strict=True):
        filled = axis.contourf(c.gamma, c.omega, np.array(c.saving), levels=levels, cmap="Blues", extend="both")
        lines = axis.contour(c.gamma, c.omega, np.array(c.saving), levels=levels[::2], colors="black", linewidths=0.5)
        axis.clabel(lines, fmt=lambda v: f"{v:.0%}", fontsize=7)
        axis.set_title(f"σ = {c.sigma:g}", fontsize=9)
        axis.set_xlabel("γ: all-reduce / compute")
    axes[0, 0].set_ylabel("ω: exchange / all-reduce")
    figure.colorbar(filled, ax=axes[0].tolist(), format=lambda v, _: f"{v:.0%}", label="saving over all-reduce")
    if title:
        figure.suptitle(title, fontsize=10)
    with _writing(path, PICTURES):
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def draw_scaling(curves: dict[str, list[tuple[int, float]]], path: str | Path, *, unit: str = "s") -> Path:
    """Step time against the number of workers, a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(path)
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, points in curves.items():
        axis.plot([n for n, _ in points], [t for _, t in points], marker="o", label=name)
    axis.set_xscale("log", base=2)
    sizes = sorted({n for points in curves.values() for n, _ in points})
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("workers")
    axis.set_ylabel(f"step time ({unit})")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    with _writing(path, PICTURES):
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
