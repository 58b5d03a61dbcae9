"""What a method's model is worth: a quality factor, with its evidence and its uncertainty.

The factor is the number of steps to the loss of all-reduce, over the steps of all-reduce. So step time times factor is
the time to the same loss, the score by which advice ranks. The records compare losses after the same steps; a gap g
becomes a factor exp(g / slope), where `slope` is the loss that all-reduce gains per e-fold of steps in records of the
same task.

Between the records the rule is: a replica more costs a power of their number (fitted to 4 and 16 replicas on AER), and
each doubling of the steps that averaging needs costs the same (fitted to one-peer-exponential and AER among 4 nodes).
Exact averages in every round still cost a share of AER's factor (`complete` among 16 workers, one seed).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.predict.quality import Quality


@dataclass(frozen=True)
class Gap:
    """Paired differences of the loss to all-reduce with Adam: mean and 95 % interval, over three to five seeds."""

    task: str
    slope: float
    replicas: int
    rounds: int
    mean: float
    low: float
    high: float

    def factor(self, gap: float) -> float:
        return math.exp(gap / self.slope)


# GossipAdam at all-reduce's rate: 16 workers on 4 nodes, 800 steps. `rounds`: rounds until averages are exact.
# The slopes: translation 3.124 after 400 steps and 2.447 after 800, language model 2.388 after 200 and 1.322 after 800,
# images 0.592 after 200 and 0.357 after 800.
RECORDS = ("quality-signal-translate", "quality-signal-lm", "quality-signal-vision")
GAPS = (
    Gap("translation", 0.98, 4, 2, 0.025, 0.022, 0.028),
    Gap("language model", 0.77, 4, 2, 0.017, -0.011, 0.045),
    Gap("images", 0.17, 4, 2, 0.009, 0.000, 0.018),
    Gap("translation", 0.98, 4, 4, 0.049, 0.042, 0.057),
    Gap("language model", 0.77, 4, 4, 0.030, 0.005, 0.054),
    Gap("images", 0.17, 4, 4, 0.024, 0.018, 0.030),
    Gap("translation", 0.98, 16, 4, 0.116, 0.103, 0.130),
    Gap("language model", 0.77, 16, 4, 0.060, 0.042, 0.078),
    Gap("images", 0.17, 16, 4, 0.038, 0.024, 0.051),
)
ASYNCHRONOUS = 0.10  # excess of SGD with pairwise averages: no record compares it with all-reduce by Adam
WIRES = {"fp32": 0.0, "bf16": 0.0, "fp16": 0.0, "int8": 0.01, "int4": 0.02}  # excess; no record yet
OTHER_WIRE = 0.03
EXACT = 0.3  # of the excess on AER remains if every round is an exact average: quality-paired-lm, gossipadam:complete
MOST = 3.0  # excess of any gossip
KNOWN_ROUNDS = 8  # records go to 4 rounds of exact averages; beyond this the rule extrapolates


@dataclass(frozen=True)
class QualityFactor:
    """Steps to the loss of all-reduce, relative to all-reduce: the expected number, and how far it may be off."""

    value: float
    low: float
    high: float
    evidence: str

    @property
    def words(self) -> str:
        """The factor in words."""
        if self.value == 1.0:
            return f"is taken to be as good as all-reduce ({self.evidence})"
        return (
            f"needs about {self.value - 1:.0%} more steps to the same loss (between {self.low - 1:+.0%} and "
            f"{self.high - 1:+.0%}; {self.evidence})"
        )


def _mean_excess(replicas: int, rounds: int) -> float:
    found = [g.factor(g.mean) - 1 for g in GAPS if (g.replicas, g.rounds) == (replicas, rounds)]
    return sum(found) / len(found)


NODES_EXP, NODES_AER, WORKERS_AER = _mean_excess(4, 2), _mean_excess(4, 4), _mean_excess(16, 4)
REPLICA_POWER = math.log(WORKERS_AER / NODES_AER) / math.log(15 / 3)
PER_DOUBLING = NODES_AER - NODES_EXP
# The records' intervals over the means of all tasks: about as wide as the worst task.
LOW, HIGH, FAR_HIGH = 0.3, 2.6, 3.9


def quality_factor(
    *,
    replicas: int,
    rounds: float | None,
    wire: str = "fp32",
    asynchronous: bool = False,
    every_step: bool = True,
    noise: Quality | None = None,
) -> QualityFactor:
    """Return the factor of gossip among `replicas` whose averages take `rounds` steps to be exact (None: never).

    `every_step`: all parameters are exchanged in every step, as in the records; no record has local steps, fragments or
    outer steps. `noise` is what the noise scale of the user's own run predicts; it replaces the records' factor.
    """
    if replicas == 1:
        return QualityFactor(1.0, 1.0, 1.0, "one replica: exact averages")
    steps = max(1.0, rounds if rounds else 1e4)
    mixing = PER_DOUBLING * math.log2(steps / 4)
    coarse = WIRES.get(wire, OTHER_WIRE) + ASYNCHRONOUS * asynchronous
    if noise is not None and noise.outlook.gap is not None:
        low, high = (math.exp(g / 0.77) - 1 for g in noise.outlook.gap)
        middle = max(0.0, (low + high) / 2 + max(0.0, mixing)) + coarse
        evidence = f"noise scale of your run, regime {noise.regime.name!r}, benchmarks/records/noise-scale"
        return QualityFactor(1 + min(MOST, middle), 1 + low, 1 + min(MOST, max(high, middle) * 1.5 + 0.01), evidence)
    base = NODES_AER * ((replicas - 1) / 3) ** REPLICA_POWER
    excess = min(MOST, max(EXACT * base, base + mixing) + coarse)
    known = steps <= KNOWN_ROUNDS and replicas <= 16 and not coarse and every_step
    evidence = "records quality-signal-*" if known else "extrapolated from records quality-signal-*"
    if not every_step:
        evidence += ", none of which has local steps or fragments"
    top = HIGH if known else FAR_HIGH
    return QualityFactor(1 + excess, 1 + LOW * excess - 0.01, 1 + min(MOST, top * excess + 0.01), evidence)


def allreduce_factor(wire: str) -> QualityFactor:
    """Return the factor of DDP: 1; a coarser wire has no record of this project."""
    if wire == "fp32":
        return QualityFactor(1.0, 1.0, 1.0, "the baseline")
    return QualityFactor(1.0, 1.0, 1.02, f"no record of {wire} gradients; torch's own hook, widely used")
