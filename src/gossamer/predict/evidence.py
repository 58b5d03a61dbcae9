"""What a method's model is worth: a quality factor, with its evidence and its uncertainty.

The factor is the number of steps to the loss of all-reduce, over the steps of all-reduce. So step time times factor is
the time to the same loss, the score by which advice ranks. The records compare losses after the same steps; a gap g
becomes a factor exp(g / slope), where `slope` is the loss that all-reduce gains per e-fold of steps on the same task.
The *excess* is the factor minus 1; the rule works with its mean over the tasks. The numbers are in `gaps.py`.

Between the records the rule is: a replica more costs a power of their number (fitted to 4 and 16 replicas on AER), and
a topology costs as much more or less than AER as among 4 nodes, by the rounds after which its averages are exact. More
rounds than AER's cost the same per doubling as those from the exponential graph to AER. Mixing after the step (ATC)
leaves the share of the excess that is measured for 16 workers on AER, but what slower averages cost stays: in linear
theory (record overlap-stability) ATC leaves 0.27 of the squared spread on AER and 0.76 on a ring. LocalSGD and DiLoCo
are taken to be as good as exact averages by gossip that are as rare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gossamer.predict.gaps import EXTRAS, GAPS, RECORDS, ROUNDS, Extra, worth
from gossamer.predict.quality import Quality

Basis = Literal["measured", "between", "beyond", "assumed"]

MOST = 3.0  # excess of any gossip
KNOWN_REPLICAS, KNOWN_ROUNDS = 16, 4  # the records go so far
FAR = 1.3  # beyond them the range is so many times as wide
OTHER_WIRE = 0.03
UNSEEN = {"every": "local steps", "fragments": "fragments", "staleness": "staleness", "outer": "outer steps"}


@dataclass(frozen=True)
class QualityFactor:
    """Steps to the loss of all-reduce, relative to all-reduce: the expected number, and how far it may be off."""

    value: float
    low: float
    high: float
    evidence: str
    basis: Basis = "measured"
    """`measured`: a record has this setting; `between` or `beyond` the records; `assumed`: a part has no record."""

    @property
    def words(self) -> str:
        """The factor in words."""
        if self.value == 1.0:
            return f"is taken to be as good as all-reduce ({self.evidence})"
        return (
            f"needs about {self.value - 1:.0%} more steps to the same loss (between {self.low - 1:+.0%} and "
            f"{self.high - 1:+.0%}; {self.evidence})"
        )


def _excess(replicas: int, topology: str, algorithm: str = "awc") -> dict[str, float]:
    asked = (replicas, topology, algorithm)
    return {g.task: worth({g.task: g.mean}) for g in GAPS if (g.replicas, g.topology, g.algorithm) == asked}


def _mean(found: dict[str, float]) -> float:
    return sum(found.values()) / len(found)


def _share(replicas: int, topology: str, algorithm: str = "awc") -> float:
    """Return the excess over that of AER with overlap, in the tasks that have both."""
    found, aer = _excess(replicas, topology, algorithm), _excess(replicas, "aer")
    return sum(found.values()) / sum(aer[task] for task in found)


def _ends(replicas: int, topology: str) -> tuple[float, float]:
    """Return the least and the largest end of the tasks' intervals, as excesses."""
    gaps = [g for g in GAPS if (g.replicas, g.topology, g.algorithm) == (replicas, topology, "awc")]
    return min(worth({g.task: g.low}) for g in gaps), max(worth({g.task: g.high}) for g in gaps)


NODES_AER = _mean(_excess(4, "aer"))
REPLICA_POWER = math.log(_mean(_excess(16, "aer")) / NODES_AER) / math.log(15 / 3)
SHARES = {rounds: _share(4, topology) for topology, rounds in ROUNDS.items()}
ATC = _share(16, "aer", "atc")
# Ends of the ranges over the excess, where the records do not have the setting itself: no narrower than theirs.
_RANGES = {s: _mean(_excess(*s)) for s in ((4, "one-peer-exponential"), (4, "aer"), (16, "aer"))}  # with all tasks
LOW = sum(_ends(*s)[0] / mean for s, mean in _RANGES.items()) / len(_RANGES)
HIGH = max(_ends(*s)[1] / mean for s, mean in _RANGES.items())


def quality_factor(
    *,
    replicas: int,
    rounds: float | None,
    topology: str = "aer",
    algorithm: str = "awc",
    wire: str = "fp32",
    apart: float = 1.0,
    settings: Sequence[tuple[str, int]] = (),
    noise: Quality | None = None,
) -> QualityFactor:
    """Return the factor of gossip among `replicas` whose averages take `rounds` exchanges to be exact (None: never).

    `apart`: steps between two exchanges of a parameter. `settings`: every, fragments, staleness and outer with their
    numbers, where they differ from the records, which exchange all parameters in every step. `noise` is what the noise
    scale of the user's own run predicts. It only widens the range: the expected number stays that of the records, which
    are of the present GossipAdam, while the record about noise scales is of an earlier one.
    """
    if replicas == 1:
        return QualityFactor(1.0, 1.0, 1.0, "one replica: exact averages")
    found = {name: _numbered(name, number) for name, number in settings}
    unseen = [UNSEEN[name] for name, extra in found.items() if extra is None]
    recorded = bool(settings) and not unseen  # then the records' numbers replace the rule about rarer exchanges
    extras = _named(wire, algorithm)
    base = NODES_AER * ((replicas - 1) / 3) ** REPLICA_POWER
    # Rarer exchanges were recorded among KNOWN_REPLICAS: fewer replicas lose less, as by gossip itself.
    rare = min(1.0, base / _mean(_excess(KNOWN_REPLICAS, "aer")))
    if recorded:
        extras += [replace(e, excess=e.excess * rare) for name, e in found.items() if e is not None and name != "outer"]
    extras += [e for name, e in found.items() if e is not None and name == "outer"]
    steps = max(1.0, (1.0 if recorded else apart) * rounds if rounds else 1e4)
    rarer = min(NODES_AER, base) * _mixing(steps)
    share = ATC if algorithm == "atc" else 1.0
    mixed = share * (base + min(0.0, rarer)) + max(0.0, rarer)
    excess = min(MOST, max(0.0, mixed + sum(e.excess for e in extras)))

    assumed = [e for e in extras if not e.record]
    elsewhere = noise is not None and not noise.regime.recorded
    beyond = bool(unseen) or elsewhere or replicas > KNOWN_REPLICAS or steps > KNOWN_ROUNDS
    same = not settings and any((g.replicas, g.topology, g.algorithm) == (replicas, topology, algorithm) for g in GAPS)
    basis: Basis = "beyond" if beyond else "measured" if same else "between"
    evidence = {"measured": "", "between": "interpolated from ", "beyond": "extrapolated from "}[basis] + RECORDS
    evidence += "".join(f" and {record}" for record in sorted({e.record for e in extras if e.record}))
    if unseen:
        evidence += f", none of which has {' or '.join(unseen)}"
    evidence += "".join(f"; {e.value} is assumed to cost {e.excess:.0%}" for e in assumed)
    far = FAR if beyond or any(e.excess for e in assumed) else 1.0
    low, high = 1 + LOW * excess - 0.01, 1 + min(MOST, far * HIGH * excess + 0.01)
    if same and algorithm == "awc" and steps <= KNOWN_ROUNDS and not any(e.excess for e in assumed):
        own = [1 + end for end in _ends(replicas, topology)]
        low, high = (min(low, own[0]), max(high, own[1])) if elsewhere else own
    if noise is not None:
        evidence += f"; your noise scale ({noise.regime.name}) is {'not ' * elsewhere}that of their tasks"
        if noise.outlook.earlier is not None:
            low, high = min(low, 1 + noise.outlook.earlier[0]), max(high, 1 + noise.outlook.earlier[1])
            evidence += ", and the range includes what the older record noise-scale has there"
    return QualityFactor(1 + excess, low, high, evidence, "assumed" if assumed else basis)


def averages_factor(method: str, every: int, replicas: int) -> QualityFactor:
    """Return the factor of LocalSGD or DiLoCo: exact averages every so many steps."""
    found = _numbered(method, every)
    if found is None:
        return quality_factor(
            replicas=replicas, rounds=1, topology="complete", apart=every, settings=[("every", every)]
        )
    excess = min(MOST, max(0.0, found.excess))
    points = [int(e.value) for e in EXTRAS if e.setting == method and e.record]
    basis: Basis = "measured" if every in points else "between" if every < max(points) else "beyond"
    low, high = 1 + LOW * excess - 0.01, 1 + HIGH * excess + 0.01
    return QualityFactor(1 + excess, low, high, f"records {found.record}", basis)


def allreduce_factor(wire: str) -> QualityFactor:
    """Return the factor of DDP: 1; a coarser wire has no record of this project."""
    if wire == "fp32":
        return QualityFactor(1.0, 1.0, 1.0, "the baseline")
    return QualityFactor(1.0, 1.0, 1.02, f"no record of {wire} gradients; torch's own hook, widely used", "assumed")


def has_record(setting: str) -> bool:
    """Return whether a record says what a setting costs."""
    return any(e.setting == setting and e.record for e in EXTRAS)


def _mixing(steps: float) -> float:
    """Return what averages that are exact after so many steps cost beyond AER's, as a share of AER among 4 nodes."""
    if steps >= 4:
        return (1 - SHARES[2]) * math.log2(steps / 4)
    below = 1 if steps < 2 else 2
    return SHARES[below] + (SHARES[2 * below] - SHARES[below]) * math.log2(steps / below) - 1


def _named(wire: str, algorithm: str) -> list[Extra]:
    found = [e for e in EXTRAS if (e.setting, e.value) in (("wire", wire), ("algorithm", algorithm))]
    if wire != "fp32" and not any(e.setting == "wire" for e in found):
        found.append(Extra("wire", wire, OTHER_WIRE))
    return found


def _numbered(setting: str, number: int) -> Extra | None:
    """Return what a setting adds at a number, over the logarithm between and beyond the recorded ones; None if none."""
    points = sorted((int(e.value), e.excess, e.record) for e in EXTRAS if e.setting == setting and e.record)
    if not points:
        return None
    line = points if setting == "outer" else [(1, 0.0, ""), *points]
    at = next((k for k, (x, _, _) in enumerate(line) if x >= number), len(line) - 1)
    (x, low, _), (y, high, record) = line[max(0, at - 1)], line[at]
    part = math.log(number / x) / math.log(y / x) if y > x else 0.0
    return Extra(setting, number, low + (high - low) * part, record)
