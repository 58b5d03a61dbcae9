"""Pictures of a topology: workers inside their nodes, one panel per round.

Blue solid lines join workers of one node, orange dashed lines cross nodes. A group of three or more workers has a tint
of its own; a thick line between two nodes (or to a hub, for a group over many nodes) stands for all pairs of the
group's workers there. Gray workers keep their value in that round.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError
from gossamer.report.html import page
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
from gossamer.topology import Layout, Round, Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTRA, INTER, IDLE, BOX = "#0072b2", "#d55e00", "#c9ced6", "#f3f5f8"
TINTS = ("#8ecae6", "#ffd166", "#95d5b2", "#cdb4db", "#f4a6a6", "#bcb8b1", "#a0c4ff", "#e9c46a", "#b5e48c", "#ffc8dd")
CLIQUE = 8  # parts of a group up to this size show every pair, larger ones only their outline
HUB = 4  # a group over more nodes than this is drawn as spokes to a hub, not as all pairs of nodes
MAX_PANELS = 16
MAX_WORKERS = 1024  # with more workers the dots merge
NAMED = 16  # members of a group that a hover text lists

Point = tuple[float, float]
Line = tuple[Point, Point]


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
            axis.text(x, y, str(worker), size=min(8, 0.3 * unit), ha="center", va="center_baseline", zorder=4)


@dataclass(frozen=True)
class Scene:
    """Where everything is, in units of the distance between neighboring workers."""

    workers: tuple[Point, ...]
    boxes: tuple[tuple[float, float, float], ...]  # center x, center y, half of the side, for each node
    extent: float

    @classmethod
    def of(cls, layout: Layout) -> Scene:
        """Nodes on a circle, workers on a circle inside their node: so no three are in line."""
        radii = [_radius(len(m)) for m in layout.members]
        halves = [r + 0.55 for r in radii]
        apart = 2 * max(halves) * (1.0 if layout.nodes in (2, 4) else 1.25) + 1.2
        centers = _circle(layout.nodes, apart / 2 / math.sin(math.pi / layout.nodes) if layout.nodes > 1 else 0.0)
        where = [(0.0, 0.0)] * layout.n
        for (x, y), radius, members in zip(centers, radii, layout.members, strict=True):
            for worker, (dx, dy) in zip(members, _circle(len(members), radius), strict=True):
                where[worker] = (x + dx, y + dy)
        extent = max(max(abs(x), abs(y)) + h for (x, y), h in zip(centers, halves, strict=True))
        boxes = tuple((x, y, h) for (x, y), h in zip(centers, halves, strict=True))
        return cls(tuple(where), boxes, extent + 0.6)


def _radius(count: int) -> float:
    return 0.0 if count == 1 else 0.5 / math.sin(math.pi / count)


def _circle(count: int, radius: float) -> list[Point]:
    """Points clockwise; the first top left for two and four (a row, a square), else at the top."""
    start = {2: math.pi, 4: 0.75 * math.pi}.get(count, math.pi / 2)
    angles = [start - 2 * math.pi * i / count for i in range(count)]
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


@dataclass(frozen=True)
class Panel:
    """What to draw for one round."""

    intra: tuple[Line, ...]
    inter: tuple[Line, ...]
    bands: tuple[Line, ...]  # each stands for all pairs of two parts of a group, across nodes
    hubs: tuple[Point, ...]
    outlines: tuple[tuple[tuple[Point, ...], str], ...]  # parts of three workers and more, with the group's tint
    colors: tuple[str, ...]  # of each worker

    @classmethod
    def of(cls, round: Round, layout: Layout, scene: Scene) -> Panel:
        at = scene.workers
        intra: list[Line] = []
        inter: list[Line] = []
        bands: list[Line] = []
        hubs: list[Point] = []
        outlines: list[tuple[tuple[Point, ...], str]] = []
        colors = [IDLE] * layout.n
        big = 0
        for group in round.groups:
            if len(group) == 1:
                continue
            tint = "white"
            if len(group) > 2 and round.weights is None:
                tint = TINTS[big % len(TINTS)]
                big += 1
            for worker in group:
                colors[worker] = tint
            if round.weights is not None:
                continue
            parts = _parts(group, layout)
            for part in parts:
                if len(part) <= CLIQUE:
                    intra += [(at[i], at[j]) for k, i in enumerate(part) for j in part[k + 1 :]]
                if len(part) > 2:
                    outlines.append((tuple(at[i] for i in part), tint))
            ends = [_center([at[i] for i in part]) for part in parts]
            homes = [scene.boxes[layout.node[part[0]]] for part in parts]
            if len(parts) > HUB:
                hub = _center(ends)
                hubs.append(hub)
                bands += [(_exit(end, hub, home), hub) for end, home in zip(ends, homes, strict=True)]
                continue
            for k, part in enumerate(parts):
                for m in range(k + 1, len(parts)):
                    if len(part) == len(parts[m]) == 1:
                        inter.append((at[part[0]], at[parts[m][0]]))
                    else:
                        bands.append((_exit(ends[k], ends[m], homes[k]), _exit(ends[m], ends[k], homes[m])))
        edges = {(i, j) for i, j, _ in round.weights or ()}
        for i, j in sorted(edges):
            if i < j or (j, i) not in edges:
                (intra if layout.node[i] == layout.node[j] else inter).append((at[i], at[j]))
        return cls(tuple(intra), tuple(inter), tuple(bands), tuple(hubs), tuple(outlines), tuple(colors))


def _parts(group: tuple[int, ...], layout: Layout) -> list[tuple[int, ...]]:
    """The group's workers, node by node."""
    parts: dict[int, list[int]] = defaultdict(list)
    for worker in group:
        parts[layout.node[worker]].append(worker)
    return [tuple(p) for p in parts.values()]


def _center(points: list[Point]) -> Point:
    x, y = np.mean(points, axis=0)
    return float(x), float(y)


def _exit(start: Point, end: Point, box: tuple[float, float, float]) -> Point:
    """Where the line from start (inside the box) to end leaves the box."""
    share = 1.0
    for axis in (0, 1):
        step = end[axis] - start[axis]
        if abs(step) > 1e-9:
            share = min(share, (box[axis] + math.copysign(box[2], step) - start[axis]) / step)
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def grid(count: int) -> tuple[int, int]:
    """Rows and columns for that many panels."""
    columns = count if count <= 3 else 2 if count == 4 else 3 if count <= 6 else 4
    return -(-count // columns), columns
