"""The noise scale that runs have measured, in one line, and what it predicts about gossip."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.predict.quality import UNCERTAIN, Quality, predict_quality
from gossamer.report.runs import Group

NOT_MEASURED = (
    "noise scale not measured: it takes more than a few steps of GossipAdam; train by gossipadam:aer with several "
    "replicas, or by ddp with --optimizer gossipadam --discount 2"
)
SAME = ("task", "steps", "per_node", "exact_inside", "micro_batches", "options")  # of runs that measure the same


@dataclass(frozen=True)
class Noise:
    """The noise scale of a task, and the batches of the runs that have measured it."""

    scale: float
    """In the task's unit; infinite if no signal was found."""
    unit: str
    replica_batch: float
    global_batch: float
    per_node: tuple[int, ...]
    partition: str
    method: str
    runs: int

    @property
    def amount(self) -> str:
        """The noise scale in words."""
        if math.isinf(self.scale):
            return f"too large to measure, in {self.unit}"
        return f"about {rounded(self.scale)} {self.unit}"

    @property
    def one_replica(self) -> bool:
        """Whether it was measured under all-reduce."""
        return self.replica_batch >= self.global_batch

    @property
    def workers(self) -> int:
        return sum(self.per_node)

    @property
    def worker_batch(self) -> float:
        return self.global_batch / self.workers

    def line(self) -> str:
        """Compare the noise scale with the batches, in one sentence."""
        who, everyone = ("worker", "workers") if self.one_replica else ("replica", "replicas")
        local = self.worker_batch if self.one_replica else self.replica_batch
        found = predict_quality(self.scale, local, self.global_batch)
        return (
            f"noise scale {self.amount}: one {who}'s batch has {local:,.0f}, all {everyone} together "
            f"{self.global_batch:,.0f}, so {found.regime.means}."
        )

    def predictions(self) -> dict[str, Quality]:
        """Return what to expect of gossip among all workers, and of gossip with exact averages inside nodes."""
        everyone, nodes = self.global_batch, len(self.per_node)
        found = {f"gossip of all {self.workers} workers": predict_quality(self.scale, self.worker_batch, everyone)}
        if 1 < nodes < self.workers:
            inside = predict_quality(self.scale, everyone / nodes, everyone, exact_inside=True)
            found["gossip with exact averages inside nodes"] = inside
        return found

    def sentence(self) -> str:
        """Say whether gossip will be as good as all-reduce, how sure that is, and by which records."""
        said = "; ".join(f"{who} {quality}" for who, quality in self.predictions().items())
        unseen = ""
        if self.partition != "iid":
            unseen = f"; it does not see how the data of the workers differ (partition {self.partition})"
        return f"With GossipAdam at all-reduce's learning rate, {said}. {UNCERTAIN}{unseen}."

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON values; an infinite noise scale is None."""
        return {
            "noise": self.line(),
            "sentence": self.sentence(),
            "noise_scale": None if math.isinf(self.scale) else self.scale,
            "unit": self.unit,
            "replica_batch": self.replica_batch,
            "global_batch": self.global_batch,
            "measured_by": self.method,
            "runs": self.runs,
            "predictions": [{"setting": who, **quality.to_dict()} for who, quality in self.predictions().items()],
        }


def measured(groups: Sequence[Group]) -> list[Noise]:
    """Return the noise scale for every task, length, layout and batch; the median where several runs have measured it.

    Runs of all-reduce count only if no run of gossip has measured it: their model is another one after the same steps.
    """
    known = [g for g in groups if g.noise_scale is not None]
    known = [g for g in known if not g.all_reduce] or known
    found: dict[str, list[Group]] = {}
    for g in known:
        config = g.runs[0].config
        found.setdefault(json.dumps([config.get(name) for name in SAME]), []).append(g)
    return [_pooled(same) for same in found.values()]


def noise_line(groups: Sequence[Group]) -> str:
    """Say what the noise scale of the task is, or how to measure it."""
    found = measured(groups)
    if len(found) > 1:
        return " ".join(f"{noise.method}: {noise.line()}" for noise in found)
    return found[0].line() if found else f"{NOT_MEASURED}."


def _pooled(groups: Sequence[Group]) -> Noise:
    runs = [r for g in groups for r in g.runs if r.noise_scale is not None]
    first = runs[0]
    assert first.batches is not None
    return Noise(
        scale=statistics.median(r.noise_scale for r in runs if r.noise_scale is not None),
        unit=str(first.content.get("unit", "samples")),
        replica_batch=first.batches[0],
        global_batch=first.batches[1],
        per_node=tuple(first.config["per_node"]),
        partition=str(first.config["options"].get("partition", "iid")),
        method=groups[0].label,
        runs=len(runs),
    )


def rounded(number: float) -> str:
    """Return two digits of a number: 3,092 becomes 3,100."""
    if math.isinf(number):
        return "∞"
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 1 else f"{number:.1g}"
