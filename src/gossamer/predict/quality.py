"""Whether gossip will be as good as all-reduce after the same steps, predicted from the noise scale of the task.

The noise scale is the number of samples whose mean gradient holds as much signal as noise. It is compared with the
batch of one replica and with that of all replicas together. `REGIMES` is the whole rule: a rule of thumb from small
runs, with the records behind each line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.errors import InputError


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
    expected: str
    """What to expect of gossip with GossipAdam at all-reduce's learning rate, as a verb phrase."""
    gap: tuple[float, float]
    """The smallest and the largest difference of the loss, in nats, to all-reduce with Adam in the records."""
    records: tuple[str, ...]
    """The evidence, in benchmarks/records."""


# The first range that the noise scale reaches applies. The limits are our judgment: the runs of the records with gossip
# lie at 0.9 times the global batch and less, or at 2 times and more. The second range is wide and uncertain because
# all-reduce measures a larger noise scale than gossip after the same steps: 3 to 7 times the global batch where gossip
# is behind.
REGIMES = (
    Regime(
        "noise everywhere",
        from_local=1.0,
        from_global=10.0,
        means="noise dominates every gradient, also that of all-reduce, and the correction acts like √κ times the rate",
        expected="will probably be as good as all-reduce",
        gap=(-0.06, 0.03),
        records=("noise-scale", "quality-paired-translate"),
    ),
    Regime(
        "noise in every replica",
        from_local=1.0,
        from_global=1.0,
        means="a replica sees mostly noise, of which all-reduce averages a large part away",
        expected="may be as good as all-reduce, or behind: compare both",
        gap=(-0.03, 0.27),
        records=("noise-scale",),
    ),
    Regime(
        "signal in all-reduce",
        from_local=1.0,
        from_global=0.0,
        means="a replica sees mostly noise where all-reduce sees mostly signal",
        expected="will probably be behind all-reduce after this many steps, and less so after more",
        gap=(0.04, 0.27),
        records=("noise-scale", "quality-paired-lm"),
    ),
    Regime(
        "signal everywhere",
        from_local=0.0,
        from_global=0.0,
        means="there is little noise to correct, and GossipAdam and Adam are alike",
        expected="will differ from all-reduce by the delay and the partial mixing of the exchange only",
        gap=(0.0, 0.19),
        records=("noise-scale",),
    ),
)
UNCERTAIN = "This is a rule of thumb from short runs of small models, and the noise scale grows during training"


@dataclass(frozen=True)
class Quality:
    """The prediction for one replica's batch."""

    regime: Regime
    replica_batch: float
    rate_of_adam: float
    """How many times too small the steps of plain Adam are with gossip, and so the factor for its learning rate."""

    def to_dict(self) -> dict[str, object]:
        return {
            "replica_batch": self.replica_batch,
            "regime": self.regime.name,
            "expected": self.regime.expected,
            "gap_in_records": list(self.regime.gap),
            "rate_of_adam": self.rate_of_adam,
            "records": [f"benchmarks/records/{name}" for name in self.regime.records],
        }


def predict_quality(noise_scale: float, replica_batch: float, global_batch: float) -> Quality:
    """Predict the quality of gossip; all numbers are in the same unit, and `noise_scale` may be infinite."""
    if not (noise_scale >= 0 and 0 < replica_batch <= global_batch < math.inf):
        raise InputError(
            f"noise scale {noise_scale:g}, batch of a replica {replica_batch:g} and of all replicas {global_batch:g}: "
            "pass a noise scale of at least 0, and positive batches of which the second is not the smaller one"
        )
    reached = (r for r in REGIMES if noise_scale >= max(r.from_local * replica_batch, r.from_global * global_batch))
    return Quality(next(reached), replica_batch, _rate_of_adam(noise_scale, replica_batch, global_batch))


def _rate_of_adam(noise_scale: float, replica_batch: float, global_batch: float) -> float:
    """sqrt of the ratio of second moments, μ² (1 + N/b) with gossip and μ² (1 + N/B) with all-reduce."""
    if math.isinf(noise_scale):
        return math.sqrt(global_batch / replica_batch)
    return math.sqrt((1 + noise_scale / replica_batch) / (1 + noise_scale / global_batch))
