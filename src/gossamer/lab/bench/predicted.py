"""Predicted step times of a benchmark: from a probe of the lab's links and processors, made just before."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.errors import InputError
from gossamer.lab.bench.alone import WARM_UP, alone
from gossamer.lab.bench.setup import Setup
from gossamer.lab.cpu import usable_cores
from gossamer.lab.workers import WorkerPool
from gossamer.predict.choices import BucketPlan, Choice, Gradients
from gossamer.predict.cluster import ClusterSpec
from gossamer.predict.methods import Method
from gossamer.predict.probed import cluster_from_probe

STEPS = 8  # of training without communication
PROBE_SECONDS = 0.3  # per bandwidth
ProbeWorker = Callable[[int, float], dict[str, Any]]


@dataclass(frozen=True)
class Probed:
    """The lab as a probe saw it: links and processors, and the emulated step without communication."""

    setup: Setup
    links: Mapping[str, Any]
    alone: Mapping[str, Any]

    def cluster(self, method: Method) -> ClusterSpec:
        """Describe the cluster for one method, whose optimizer's update was measured."""
        setup = self.setup
        compute = {
            "seconds": setup.compute + self.alone["over"],
            "jitter": setup.jitter,
            "update_seconds": self.alone["updates"][method.optimizer],
            "cores": self.alone["cores"],
            "source": "measured",
        }
        made = cluster_from_probe(self.links, compute, setup.model_mb)
        rates = dict.fromkeys(self.alone["updates"], 1.0)  # the update is known: no rate is to be added
        # the nodes of the lab share one machine
        own = {"update_gb_per_s": rates, "cores": usable_cores() / setup.n}
        changed: dict[str, Any] = {"model": {"equal_layers": setup.layers}, "costs": own}
        if setup.means:
            changed["compute"] = {"per_worker": tuple(compute["seconds"] * m for m in setup.means)}
        return made.changed(**changed)

    def step_seconds(
        self,
        method: Method,
        *,
        bucket_mb: float | None,
        options: Mapping[str, Any],
        gradients: Gradients,
        steps: int,
        seed: int,
    ) -> float:
        """Predict the step time of one run."""
        settings = {k: int(options.get(k, usual)) for k, usual in (("every", 1), ("staleness", 0), ("fragments", 1))}
        outer, plan = options.get("outer") is not None, BucketPlan(bucket_mb=bucket_mb)
        asked = int(options.get("average_every", 0))
        choice = Choice(
            method, method.algorithm, gradients, **settings, outer=outer, plan=plan, refresh=0, averages=asked
        )
        return choice.predict(self.cluster(method), max(20, steps), seed).step_time


def probe(setup: Setup, methods: Sequence[Method], pool: WorkerPool, measure: ProbeWorker, seed: int) -> Probed:
    """Measure the lab before a benchmark; `measure` is the worker function of `gossamer probe`."""
    if setup.network == "paced":
        raise InputError(
            "a prediction needs links that a probe can measure, and paced links are slowed only in exchanges; use "
            "--network namespaces (Linux, root), or no --link"
        )
    if setup.n == 1:
        raise InputError("one worker has no links to predict; use at least two")
    links = pool.run(measure, PROBE_SECONDS, timeout=600)[0]
    table = setup.table(WARM_UP + STEPS, seed)
    seconds = [[float(s) for s in column] for column in table.T]
    optimizers = list(dict.fromkeys(m.optimizer for m in methods))
    answers = pool.run(alone, setup, seconds, optimizers, timeout=600 + 50 * float(table.sum()))
    merged = {
        "over": max(0.0, statistics.fmean(a["over"] for a in answers)),
        "cores": statistics.fmean(a["cores"] for a in answers),
        "updates": {name: max(a["updates"][name] for a in answers) for name in optimizers},
    }
    return Probed(setup, links, merged)
