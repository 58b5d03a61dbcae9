"""Whether gossip will be as good as all-reduce after the same steps, predicted from the noise scale of the task.

The noise scale is the number of samples whose mean gradient holds as much signal as noise. It is compared with the
batch of one replica and with that of all replicas together. `REGIMES` is the whole rule: a rule of thumb from small
runs, with the records behind each range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.errors import InputError

SIGNAL = tuple(f"quality-signal-{task}" for task in ("translate", "lm", "vision", "german"))


@dataclass(frozen=True)
class Outlook:
    """What to expect of GossipAdam at all-reduce's learning rate."""

    expected: str
    """A verb phrase."""
    gap: tuple[float, float] | None
    """Difference of the loss (nats) to all-reduce with Adam, on AER: least and largest of the records, if any."""
    earlier: tuple[float, float] | None = None
    """The share of steps that gossip needs more, in the language model of the record noise-scale: least and largest."""


@dataclass(frozen=True)
class Regime:
    """A range of the noise scale, and what the records say about gossip there."""

    name: str
    from_local: float
    """The range begins at this multiple of the batch of one replica ..."""
    from_global: float
    """... and at this multiple of the batch of all replicas."""
    means: str
    """What the range means for gradients, as a clause."""
    workers: Outlook
    """If all workers gossip."""
    nodes: Outlook
    """If gradients are averaged exactly inside nodes, and nodes gossip."""
    records: tuple[str, ...]
    """The evidence, in benchmarks/records."""

    @property
    def recorded(self) -> bool:
        """Whether the tasks of the present records are in this range."""
        return self.records == SIGNAL


# The first range that the noise scale reaches applies. The limits were chosen before the present records were made. All
# four tasks of those (medians of their runs: 1.7 to 5.3 times the batch of all replicas) are in the second range, and
# one was kept out of every choice. For the other ranges there is the record noise-scale only, of an earlier GossipAdam,
# which estimated the signal on each worker alone: their gaps are the ranges of both. `earlier` turns its gaps in the
# language model into steps by what all-reduce gains there per e-fold of steps, 0.34 (batch 2: 2.511 after 200 steps,
# 1.961 after 1000).
REGIMES = (
    Regime(
        "noise everywhere",
        from_local=1.0,
        from_global=10.0,
        means="noise dominates every gradient, also that of all-reduce, and the correction acts like √κ times the rate",
        workers=Outlook("will probably be behind all-reduce", (0.02, 0.16), (0.35, 0.35)),
        nodes=Outlook("will probably be close to all-reduce", (-0.01, 0.08), (0.00, 0.00)),
        records=(*SIGNAL, "noise-scale"),
    ),
    Regime(
        "noise in every replica",
        from_local=1.0,
        from_global=1.0,
        means="a replica sees mostly noise, of which all-reduce averages a large part away",
        workers=Outlook("will probably be behind all-reduce", (0.04, 0.16)),
        nodes=Outlook("will probably be a little behind all-reduce", (0.02, 0.08)),
        records=SIGNAL,
    ),
    Regime(
        "signal in all-reduce",
        from_local=1.0,
        from_global=0.0,
        means="a replica sees mostly noise where all-reduce sees mostly signal",
        workers=Outlook("will probably be behind all-reduce, less with larger batches", (0.04, 0.16), (0.12, 0.33)),
        nodes=Outlook("will probably be close to all-reduce", (-0.04, 0.08), (-0.10, -0.10)),
        records=(*SIGNAL, "noise-scale"),
    ),
    Regime(
        "signal everywhere",
        from_local=0.0,
        from_global=0.0,
        means="there is little noise to correct, and GossipAdam and Adam are alike",
        workers=Outlook("should be close to all-reduce", None),
        nodes=Outlook("should be close to all-reduce", None),
        records=(*SIGNAL, "noise-scale"),
    ),
)
UNCERTAIN = "This is a rule of thumb from short runs of small models, and the noise scale grows during training"


@dataclass(frozen=True)
class Quality:
    """The prediction for one replica's batch."""

    regime: Regime
    outlook: Outlook
    replica_batch: float
    rate_of_adam: float
    """How many times too small the steps of plain Adam are with gossip, and so the factor for its learning rate."""

    def to_dict(self) -> dict[str, object]:
        return {
            "replica_batch": self.replica_batch,
            "regime": self.regime.name,
            "expected": self.outlook.expected,
            "gap_in_records": self.outlook.gap and list(self.outlook.gap),
            "rate_of_adam": self.rate_of_adam,
            "records": [f"benchmarks/records/{name}" for name in self.regime.records],
        }

    def __str__(self) -> str:
        found = "benchmarks/records/quality-signal-*"
        found += "" if self.regime.recorded else " and, of an earlier form, noise-scale"
        if self.outlook.gap is None:
            return f"{self.outlook.expected} (no run like this in {found})"
        low, high = self.outlook.gap
        return f"{self.outlook.expected} (on aer the loss is {low:+.2f} to {high:+.2f} against all-reduce in {found})"


def predict_quality(
    noise_scale: float, replica_batch: float, global_batch: float, *, exact_inside: bool = False
) -> Quality:
    """Predict the quality of gossip; all numbers are in the same unit, and `noise_scale` may be infinite."""
    if not (noise_scale >= 0 and 0 < replica_batch <= global_batch < math.inf):
        raise InputError(
            f"noise scale {noise_scale:g}, batch of a replica {replica_batch:g} and of all replicas {global_batch:g}: "
            "pass a noise scale of at least 0, and positive batches of which the second is not the smaller one"
        )
    reached = (r for r in REGIMES if noise_scale >= max(r.from_local * replica_batch, r.from_global * global_batch))
    regime = next(reached)
    outlook = regime.nodes if exact_inside else regime.workers
    return Quality(regime, outlook, replica_batch, _rate_of_adam(noise_scale, replica_batch, global_batch))


def _rate_of_adam(noise_scale: float, replica_batch: float, global_batch: float) -> float:
    """sqrt of the ratio of second moments, μ² (1 + N/b) with gossip and μ² (1 + N/B) with all-reduce."""
    if math.isinf(noise_scale):
        return math.sqrt(global_batch / replica_batch)
    return math.sqrt((1 + noise_scale / replica_batch) / (1 + noise_scale / global_batch))
