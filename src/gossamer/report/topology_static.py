"""Topology pictures as SVG or PNG, by matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gossamer.report.topology_scene import BOX, IDLE, INTER, INTRA, Panel, Scene, grid
from gossamer.topology import Topology


def draw(topology: Topology, scene: Scene, panels: list[Panel], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import EllipseCollection, LineCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch, Polygon

    rows, columns = grid(len(panels))
    side = min(4.6, max(2.6, 0.55 * scene.extent)) if len(panels) > 1 else min(9.0, max(4.6, 0.55 * scene.extent))
    width, height = max(columns * side, 5.2, 0.098 * len(title)), rows * (side + 0.25)
    figure = Figure(figsize=(width, height + 1.0), facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, y=1 - 0.18 / (height + 1), va="top", fontsize=12, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    edge = 0.1 / width
    figure.subplots_adjust(edge, 0.42 / (height + 1), 1 - edge, 1 - 0.75 / (height + 1), wspace=0.03, hspace=0.12)
    unit = side * 72 * 0.93 / (2 * scene.extent)  # points per unit of the scene
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for k, (panel, axis) in enumerate(zip(panels, axes, strict=False)):
        axis.set(xlim=(-scene.extent, scene.extent), ylim=(-scene.extent, scene.extent), aspect="equal")
        axis.set_axis_off()
        axis.set_title(f"round {k}", fontsize=10, pad=2)
        for m, (x, y, half) in enumerate(scene.boxes):
            corner, rounding = (x - half + 0.2, y - half + 0.2), "round,pad=0.2,rounding_size=0.3"
            size = 2 * half - 0.4
            axis.add_patch(FancyBboxPatch(corner, size, size, boxstyle=rounding, fc=BOX, ec="#8c959f", lw=0.8))
            if topology.layout.nodes > 1:
                place = {"y": y + half + 0.08, "va": "bottom"} if y > -1e-9 else {"y": y - half - 0.12, "va": "top"}
                axis.text(x, s=f"node {m}", size=min(8, 0.42 * unit), color="#57606a", ha="center", **place)
        for points, tint in panel.outlines:
            axis.add_patch(
                Polygon(points, closed=True, fc=tint, ec=tint, alpha=0.45, lw=0.62 * unit, joinstyle="round")
            )
        thin = min(2.0, 0.09 * unit)
        axis.add_collection(LineCollection(panel.intra, colors=INTRA, linewidths=thin, zorder=2))
        axis.add_collection(
            LineCollection(panel.inter, colors=INTER, linewidths=thin, linestyles=(0, (4, 1.5)), zorder=2)
        )
        axis.add_collection(
            LineCollection(
                panel.bands, colors=INTER, linewidths=2.5 * thin, linestyles=(0, (1.8, 0.7)), alpha=0.8, zorder=2
            )
        )
        axis.scatter(*np.reshape(panel.hubs, (-1, 2)).T, s=(0.35 * unit) ** 2, c=INTER, zorder=3)
        dots = EllipseCollection(
            [0.6] * topology.n,
            [0.6] * topology.n,
            [0] * topology.n,
            units="x",
            offsets=scene.workers,
            offset_transform=axis.transData,
            facecolors=panel.colors,
            edgecolors="#24292f",
            linewidths=min(0.9, 0.05 * unit),
            zorder=3,
        )
        axis.add_collection(dots)
        if unit > 9:
            for worker, (x, y) in enumerate(scene.workers):
                axis.text(x, y, str(worker), size=min(8, 0.3 * unit), ha="center", va="center_baseline", zorder=4)
    handles = [
        Line2D([], [], color=INTRA, lw=2, label="inside a node"),
        Line2D([], [], color=INTER, lw=2, ls=(0, (4, 1.5)), label="across nodes"),
        Line2D([], [], ls="", marker="o", mfc=IDLE, mec="#24292f", label="keeps its value"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
