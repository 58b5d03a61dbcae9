"""Topology pictures as one self-contained HTML page, by plotly; hovering over a worker names its group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.report.topology_scene import BOX, IDLE, INTER, INTRA, Panel, Point, Scene, grid
from gossamer.topology import Topology

OUTLINE = {"color": "#24292f", "width": 1}


def draw(topology: Topology, scene: Scene, panels: list[Panel], title: str, path: Path) -> None:
    from plotly.subplots import make_subplots

    rows, columns = grid(len(panels))
    side = 420 if len(panels) > 1 else 760
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[f"round {k}" for k in range(len(panels))],
        horizontal_spacing=0.01,
        vertical_spacing=0.06 / rows,
    )
    span = [-scene.extent, scene.extent]
    for k, panel in enumerate(panels):
        at = {"row": k // columns + 1, "col": k % columns + 1}
        _add_panel(figure, topology, scene, panel, k, side / (2 * scene.extent), at)
        figure.update_xaxes(visible=False, range=span, constrain="domain", **at)
        figure.update_yaxes(visible=False, range=span, constrain="domain", scaleanchor=f"x{k + 1 if k else ''}", **at)
    for name, style in (
        ("inside a node", {"mode": "lines", "line": {"color": INTRA, "width": 2}}),
        ("across nodes", {"mode": "lines", "line": {"color": INTER, "width": 2, "dash": "8px,3px"}}),
        ("keeps its value", {"mode": "markers", "marker": {"color": IDLE, "size": 12, "line": OUTLINE}}),
    ):
        figure.add_scatter(x=[None], y=[None], name=name, legendgroup=name, **style)
    figure.update_layout(
        title=title,
        template="plotly_white",
        width=max(columns * side, 640),
        height=rows * (side + 30) + 130,
        margin={"l": 10, "r": 10, "t": 90, "b": 50},
        legend={"orientation": "h", "x": 0.5, "xanchor": "center", "y": -0.02},
    )
    figure.write_html(path, include_plotlyjs=True)


def _add_panel(
    figure: Any, topology: Topology, scene: Scene, panel: Panel, k: int, unit: float, at: dict[str, int]
) -> None:
    """Draw round k; `unit` is the scene's unit in pixels."""

    def add(points: Sequence[Point | tuple[None, None]], **style: Any) -> None:
        x, y = [p[0] for p in points], [p[1] for p in points]
        figure.add_scatter(**{"x": x, "y": y, "hoverinfo": "skip", "showlegend": False, **style, **at})

    for x, y, half in scene.boxes:
        line = {"color": "#8c959f", "width": 1}
        figure.add_shape(type="path", path=_rounded(x, y, half), fillcolor=BOX, line=line, layer="below", **at)
    if topology.layout.nodes > 1:
        add(
            [(x, y + (half + 0.3) * (1 if y > -1e-9 else -1)) for x, y, half in scene.boxes],
            mode="text",
            text=[f"node {m}" for m in range(len(scene.boxes))],
            textfont={"size": max(6, min(12, 0.45 * unit)), "color": "#57606a"},
        )
    for points, tint in panel.outlines:
        line = {"color": tint, "width": 0.62 * unit}
        add([*points, points[0]], mode="lines", fill="toself", fillcolor=tint, opacity=0.45, line=line)
    for name, lines, line in (
        ("inside a node", panel.intra, {"color": INTRA, "width": 2}),
        ("across nodes", panel.inter, {"color": INTER, "width": 2, "dash": "8px,3px"}),
        ("across nodes", panel.bands, {"color": INTER, "width": 6, "dash": "10px,4px"}),
    ):
        gapped = [p for a, b in lines for p in (a, b, (None, None))]
        add(gapped, mode="lines", line=line, legendgroup=name)
    add(panel.hubs, mode="markers", marker={"size": 0.35 * unit, "color": INTER})
    add(
        scene.workers,
        mode="markers+text" if unit > 12 else "markers",
        text=[str(w) for w in range(topology.n)],
        textfont={"size": max(6, min(12, 0.3 * unit))},
        marker={"size": 0.6 * unit, "color": panel.colors, "line": OUTLINE},
        hovertext=[_hover(topology, k, w) for w in range(topology.n)],
        hoverinfo="text",
    )


def _hover(topology: Topology, k: int, worker: int) -> str:
    group = topology.round(k).group_of(worker)
    partners = ", ".join(str(w) for w in group[:16]) + (", ..." if len(group) > 16 else "")
    return f"worker {worker} on node {topology.layout.node[worker]}<br>group {partners}"


def _rounded(x: float, y: float, half: float, corner: float = 0.3) -> str:
    """An SVG path for a square with round corners."""
    low_x, high_x, low_y, high_y, c = x - half, x + half, y - half, y + half, corner
    return (
        f"M{low_x + c},{low_y} L{high_x - c},{low_y} Q{high_x},{low_y} {high_x},{low_y + c} L{high_x},{high_y - c} "
        f"Q{high_x},{high_y} {high_x - c},{high_y} L{low_x + c},{high_y} Q{low_x},{high_y} {low_x},{high_y - c} "
        f"L{low_x},{low_y + c} Q{low_x},{low_y} {low_x + c},{low_y} Z"
    )
