"""What is fixed about a watched run: its workers, its topology as a drawing, and the bandwidth of its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError, InputError
from gossamer.predict.methods import Method, parse
from gossamer.report.plots.scene import Panel, Scene
from gossamer.report.runs import read_object
from gossamer.topology import Layout, Round, Topology, resolve
from gossamer.topology.replan import replanned
from gossamer.trace import read_chrome

MOST_ROUNDS = 32  # whose drawings a page holds
DRAWN_WORKERS = 256  # a page draws no topology of more
BY_WORKER = 16  # links are shown between workers up to this many, between nodes from there


@dataclass(frozen=True)
class Facts:
    """A run as its `config.json` describes it."""

    folder: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Facts:
        """Read the run in `folder`; raises `InputError` if there is none."""
        if not folder.exists():
            raise InputError(f"{folder} does not exist; pass the folder of a run, the --out of gossamer train")
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} is not the folder of a run (no config.json){_inside(folder)}")
        content = read_object(folder / "config.json")
        try:
            found = cls(folder, content)
            found.config["steps"], found.layout, found.method, found.clock["kind"]
        except (KeyError, TypeError, AttributeError, InputError) as error:
            why = error if isinstance(error, InputError) else "config, method, steps, per_node or clock is not right"
            raise InputError(f"{folder / 'config.json'} is damaged: {why}; restore it or watch another run") from None
        return found

    @property
    def config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.content["config"]
        return found

    @property
    def clock(self) -> Mapping[str, Any]:
        return dict(self.content.get("clock", {"kind": "measured"}))

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.config["per_node"])

    @cached_property
    def method(self) -> Method:
        return parse(self.config["method"])

    @property
    def steps(self) -> int:
        return int(self.config["steps"])

    @property
    def virtual(self) -> bool:
        return bool(self.config.get("virtual"))

    @property
    def elastic(self) -> bool:
        return self.config.get("on_failure") == "continue"

    @property
    def exact_inside(self) -> bool:
        return bool(self.config.get("exact_inside")) and self.method.algorithm != "ddp"

    @property
    def every(self) -> int:
        """Steps between two exchanges."""
        return int(self.config.get("every", 1))

    @property
    def by_worker(self) -> bool:
        """Whether links are shown between workers instead of nodes."""
        return self.layout.n <= BY_WORKER or self.layout.nodes == 1

    @property
    def kind(self) -> str:
        if self.method.algorithm == "ddp":
            return "all-reduce"
        return "asynchronous" if self.method.asynchronous else "elastic" if self.elastic else "synchronous"

    @cached_property
    def _gossips(self) -> Layout:
        """The layout over which the topology is made: that of the nodes if they average exactly inside."""
        return Layout.of([1] * self.layout.nodes) if self.exact_inside else self.layout

    @cached_property
    def _founding(self) -> Topology | None:
        if self.method.topology is None:
            return None
        return resolve(self.method.topology, self._gossips)

    @cached_property
    def scene(self) -> Scene:
        return Scene.of(self.layout)

    def rounds(self, members: Sequence[int] | None = None) -> list[Round]:
        """Return the rounds of a period among `members` (all workers by default), by the ranks of the founding job."""
        everyone = list(range(self.layout.n))
        founding = self._founding
        if founding is None:
            return [Round.uniform(self.layout.n, [everyone])]
        alive = everyone if members is None else sorted(set(members) & set(everyone)) or everyone
        topology = founding
        if len(alive) < self.layout.n:
            nodes = [self.layout.node[w] for w in alive]
            number = {node: at for at, node in enumerate(dict.fromkeys(nodes))}
            topology = replanned(self.method.topology, founding, alive, Layout(tuple(number[node] for node in nodes)))
        rounds = [topology.round(k) for k in range(min(topology.period, MOST_ROUNDS))]
        if self.exact_inside:
            return [_of_nodes(r, self.layout) for r in rounds]
        return rounds if len(alive) == self.layout.n else [_renamed(r, alive, self.layout.n) for r in rounds]

    def plan(self, members: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the rounds among `members` as drawings in the coordinates of `scene`."""
        if self.layout.n > DRAWN_WORKERS:
            return {"period": 0, "rounds": []}
        try:
            panels = [Panel.of(r, self.layout, self.scene) for r in self.rounds(members)]
        except GossamerError:  # a topology file that is not there any more
            return {"period": 0, "rounds": []}
        return {"period": len(panels), "rounds": [_rounded(asdict(p)) for p in panels]}

    @cached_property
    def byte_scale(self) -> float:
        """How many bytes the simulated cluster sends for one of a virtual worker, whose model is another one."""
        try:
            return (
                float(self.clock["model_mb"]) * 1e6 / (4 * float(self.content["parameters"])) if self.virtual else 1.0
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return 1.0

    @cached_property
    def predicted_waiting(self) -> list[float | None]:
        """The predicted share of time that each virtual worker waits."""
        unknown: list[float | None] = [None] * self.layout.n
        if not self.virtual:
            return unknown
        try:
            trace = read_chrome(self.folder / "predicted.json")
        except GossamerError:
            return [self.clock.get("waiting")] * self.layout.n
        if trace.workers != self.layout.n:  # nodes that average exactly inside are one worker of the prediction
            return [self.clock.get("waiting")] * self.layout.n
        waits, total = [0.0] * trace.workers, [0.0] * trace.workers
        for s in trace.spans:
            if s.category != "exchange":
                total[s.worker] += s.seconds
                waits[s.worker] += s.seconds * (s.category == "wait")
        return [w / t if t else 0.0 for w, t in zip(waits, total, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as the page reads them."""
        scene = self.scene
        return {
            "gossamer_watch": 1,
            "folder": str(self.folder),
            "task": self.config.get("task"),
            "method": str(self.method),
            "kind": self.kind,
            "virtual": self.virtual,
            "simulated": self.clock["kind"] == "simulated",
            "steps": self.steps,
            "workers": self.layout.n,
            "node": list(self.layout.node),
            "metric": self.content.get("metric", "loss"),
            "links_between": "worker" if self.by_worker else "node",
            "link_bytes_per_second": self._bandwidth(),
            "model_mb": self.clock.get("model_mb"),
            "scene": _rounded({"workers": scene.workers, "boxes": scene.boxes, "extent": scene.extent}),
            "drawn": self.layout.n <= DRAWN_WORKERS,
            "command": self.content.get("command", ""),
        }

    def _bandwidth(self) -> float | None:
        """Return what a node's link carries in a second, None if that is not known."""
        if self.clock["kind"] == "simulated":
            try:
                return float(self.clock["description"]["links"]["inter"]["bandwidth_gbps"]) * 1e9 / 8
            except (KeyError, TypeError, ValueError):
                return None
        rate = self.clock.get("link_bits_per_second")
        return None if rate is None else float(rate) / 8


def _inside(folder: Path) -> str:
    """Return a remedy: the runs below the folder if there are any."""
    below = sorted(str(f.parent) for f in folder.glob("*/config.json")) or sorted(
        str(f.parent) for f in folder.glob("*/*/config.json")
    )
    if not below:
        return "; pass the --out of gossamer train"
    more = f" and {len(below) - 3} more" if len(below) > 3 else ""
    return f"; it holds the runs {', '.join(below[:3])}{more}: watch one of those"


def _of_nodes(made: Round, layout: Layout) -> Round:
    """Return a round between nodes as one between all of their workers."""
    if made.weights is not None:
        first = [members[0] for members in layout.members]
        return Round.weighted(layout.n, [(first[i], first[j], w) for i, j, w in made.weights])
    return Round.uniform(layout.n, [[w for node in group for w in layout.members[node]] for group in made.groups])


def _renamed(made: Round, alive: Sequence[int], n: int) -> Round:
    """Return a round among the workers `alive`, numbered 0, 1, ..., by their ranks; the others are alone."""
    if made.weights is not None:
        return Round.weighted(n, [(alive[i], alive[j], w) for i, j, w in made.weights])
    gone = [[w] for w in range(n) if w not in set(alive)]
    return Round.uniform(n, [*([alive[i] for i in group] for group in made.groups), *gone])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
