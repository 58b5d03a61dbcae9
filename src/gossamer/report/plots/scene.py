"""Where the workers of a layout are drawn, and which lines join them in a round. No drawing library is needed here."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from gossamer.topology import Layout, Round

IDLE = "#c9ced6"  # a worker that keeps its value
TINTS = ("#8ecae6", "#ffd166", "#95d5b2", "#cdb4db", "#f4a6a6", "#bcb8b1", "#a0c4ff", "#e9c46a", "#b5e48c", "#ffc8dd")
CLIQUE = 8  # parts of a group up to this size show every pair, larger ones only their outline
HUB = 4  # a group over more nodes than this is drawn as spokes to a hub, not as all pairs of nodes

Point = tuple[float, float]
Line = tuple[Point, Point]


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
            inside = _circle(len(members), radius)
            if layout.nodes == 2 and len(members) == 2:  # the nodes are side by side, so the workers are not
                inside = [(0.0, radius), (0.0, -radius)]
            for worker, (dx, dy) in zip(members, inside, strict=True):
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
