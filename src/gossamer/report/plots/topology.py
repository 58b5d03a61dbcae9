"""Pictures of a topology: workers inside their nodes, one panel per round.

Blue solid lines join workers of one node, orange dashed lines cross nodes. A group of three or more workers has a tint
of its own; a thick line between two nodes (or to a hub, for a group over many nodes) stands for all pairs of the
group's workers there. Gray workers keep their value in that round.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError
from gossamer.report.html import page
from gossamer.report.plots.scene import IDLE, Panel, Scene
from gossamer.report.plots.style import (
    INK,
    PICTURES_AND_PAGES,
    QUIET,
    check_output,
    inline_svg,
    new_figure,
    save,
    write_text,
)
from gossamer.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTRA, INTER, BOX = "#0072b2", "#d55e00", "#f3f5f8"
ON_WORKER = "#1f2328"  # on the workers' light tints, on dark pages as well
MAX_PANELS = 16
MAX_WORKERS = 1024  # with more workers the dots merge
NAMED = 16  # members of a group that a hover text lists


def draw_topology(topology: Topology, path: str | Path) -> str:
    """Draw a topology to `path`; the ending chooses the format. Returns the picture's title."""
    path = check_output(path, PICTURES_AND_PAGES)
    if topology.n > MAX_WORKERS:
        raise InputError(f"a picture holds up to {MAX_WORKERS} workers, got {topology.n}; draw a smaller layout")
    scene = Scene.of(topology.layout)
    shown = min(topology.period, MAX_PANELS)
    panels = [Panel.of(topology.round(k), topology.layout, scene) for k in range(shown)]
    if shown < topology.period:
        rounds = f"the first {shown} of {topology.period} rounds"
    else:
        rounds = "one round" if shown == 1 else f"all {shown} rounds of a period"
    title = f"{topology.name}, {topology.layout}: {rounds}"
    if path.suffix.lower() == ".html":
        _write_page(topology, scene, panels, title, path)
    else:
        _write_picture(scene, panels, title, path)
    return title


def _write_picture(scene: Scene, panels: list[Panel], title: str, path: Path) -> None:
    """Draw all rounds side by side."""
    from matplotlib.lines import Line2D

    rows, columns = grid(len(panels))
    side = min(4.6, max(2.6, 0.55 * scene.extent)) if len(panels) > 1 else min(9.0, max(4.6, 0.55 * scene.extent))
    width, height = max(columns * side, 5.2, 0.098 * len(title)), rows * (side + 0.25) + 1.0
    figure = new_figure(width, height, arrange=False)
    figure.suptitle(title, y=1 - 0.18 / height, va="top", fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    edge = 0.1 / width
    figure.subplots_adjust(edge, 0.42 / height, 1 - edge, 1 - 0.75 / height, wspace=0.03, hspace=0.12)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for k, (panel, axis) in enumerate(zip(panels, axes, strict=False)):
        axis.set_title(f"round {k}", fontsize=10, pad=2)
        _draw_panel(axis, scene, panel, unit=side * 72 * 0.93 / (2 * scene.extent))
    handles = [
        Line2D([], [], color=INTRA, lw=2, label="inside a node"),
        Line2D([], [], color=INTER, lw=2, ls=(0, (4, 1.5)), label="across nodes"),
        Line2D([], [], ls="", marker="o", mfc=IDLE, mec=INK, label="keeps its value"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def _write_page(topology: Topology, scene: Scene, panels: list[Panel], title: str, path: Path) -> None:
    """Write one SVG per round. The page's script shows all rounds or one, and marks the group of a worker."""
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        '<p class="note"><b style="color:#0072b2">—</b> inside a node &nbsp; <b style="color:#d55e00">- -</b> across '
        "nodes &nbsp; gray: keeps its value. Point at a worker to see its group.</p>",
        '<p class="stepper" hidden><button data-step="-1">◀</button> <button data-step="0">all rounds</button> '
        '<button data-step="1">▶</button> <span></span></p>',
        '<div class="rounds">',
    ]
    for k, panel in enumerate(panels):
        figure = new_figure(5, 5, arrange=False)
        axis = figure.add_axes((0, 0, 1, 1))
        _draw_panel(axis, scene, panel, unit=5 * 72 / (2 * scene.extent))
        drawn = inline_svg(figure, f"round-{k}", {"workers": _hover_texts(topology, k)})
        parts.append(f"<figure><figcaption>round {k}</figcaption>{drawn}</figure>")
    write_text(path, page(title, [*parts, "</div>"]))


def _hover_texts(topology: Topology, k: int) -> list[str]:
    """Return the text of each worker in round k."""
    texts = [""] * topology.n
    for group in topology.round(k).groups:
        members = ", ".join(map(str, group[:NAMED])) + (", ..." if len(group) > NAMED else "")
        for worker in group:
            where = f"worker {worker} on node {topology.layout.node[worker]}"
            texts[worker] = f"{where}, round {k}: " + (f"group {members}" if len(group) > 1 else "keeps its value")
    return texts


def _draw_panel(axis: Axes, scene: Scene, panel: Panel, *, unit: float) -> None:
    """Draw one round; `unit` is the scene's unit in points."""
    from matplotlib.collections import EllipseCollection, LineCollection
    from matplotlib.patches import FancyBboxPatch, Polygon

    axis.set(xlim=(-scene.extent, scene.extent), ylim=(-scene.extent, scene.extent), aspect="equal")
    axis.set_axis_off()
    for m, (x, y, half) in enumerate(scene.boxes):
        corner, rounding = (x - half + 0.2, y - half + 0.2), "round,pad=0.2,rounding_size=0.3"
        size = 2 * half - 0.4
        axis.add_patch(FancyBboxPatch(corner, size, size, boxstyle=rounding, fc=BOX, ec="#8c959f", lw=0.8))
        if len(scene.boxes) > 1:
            above = y > -1e-9
            height, edge = (y + half + 0.08, "bottom") if above else (y - half - 0.12, "top")
            axis.text(x, height, f"node {m}", size=min(8, 0.42 * unit), color=QUIET, ha="center", va=edge)
    for points, tint in panel.outlines:
        axis.add_patch(Polygon(points, closed=True, fc=tint, ec=tint, alpha=0.45, lw=0.62 * unit, joinstyle="round"))
    thin = min(2.0, 0.09 * unit)
    dashes, wide_dashes = (0, (4, 1.5)), (0, (1.8, 0.7))
    axis.add_collection(LineCollection(panel.intra, colors=INTRA, linewidths=thin, zorder=2))
    axis.add_collection(LineCollection(panel.inter, colors=INTER, linewidths=thin, linestyles=dashes, zorder=2))
    axis.add_collection(
        LineCollection(panel.bands, colors=INTER, linewidths=2.5 * thin, linestyles=wide_dashes, alpha=0.8, zorder=2)
    )
    hubs_x, hubs_y = np.reshape(panel.hubs, (-1, 2)).T
    axis.scatter(hubs_x, hubs_y, s=(0.35 * unit) ** 2, c=INTER, zorder=3)
    dots = EllipseCollection(
        [0.6], [0.6], [0], units="x", offsets=scene.workers, offset_transform=axis.transData,
        facecolors=panel.colors, edgecolors=INK, linewidths=min(0.9, 0.05 * unit), zorder=3,
    )  # fmt: skip
    dots.set_gid("workers")
    axis.add_collection(dots)
    if unit > 9:
        for worker, (x, y) in enumerate(scene.workers):
            size = min(8, 0.3 * unit)
            axis.text(x, y, str(worker), size=size, ha="center", va="center_baseline", zorder=4, color=ON_WORKER)


def grid(count: int) -> tuple[int, int]:
    """Rows and columns for that many panels."""
    columns = count if count <= 3 else 2 if count == 4 else 3 if count <= 6 else 4
    return -(-count // columns), columns
