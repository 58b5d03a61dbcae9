"""Compute times of steps: seeded distributions, so that every algorithm gets the same draws.

A `Jitter` gives multipliers of the mean compute time, one per step and worker. Random ones have mean 1 and standard
deviation sigma, relative to the mean. Worker w's draws depend on the seed and on w only, so that they stay the same
when the number of workers or steps changes. `parse_jitter` reads the text form of the command line.
"""

from __future__ import annotations

import difflib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import InputError

LONGEST = 1 << 25  # characters of a recording
WIDEST, SLOWEST = 10.0, 1e6  # limits far beyond real machines: larger numbers would overflow
Table = NDArray[np.float64]  # [steps, workers]


class Jitter(ABC):
    """Multipliers of the mean compute time."""

    @abstractmethod
    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        """Return the multipliers, shape [steps, workers]; equal arguments give equal tables."""


@dataclass(frozen=True)
class Constant(Jitter):
    """`none`: every step takes the mean."""

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        return np.ones((steps, workers))


@dataclass(frozen=True)
class Gaussian(Jitter):
    """`gaussian:SIGMA`: normal(1, sigma); negative draws are cut to 0."""

    sigma: float

    def __post_init__(self) -> None:
        _check("gaussian", "sigma", self.sigma, 0.0, WIDEST)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        return np.maximum(0.0, _columns(workers, seed, lambda rng: rng.normal(1.0, self.sigma, steps)))


@dataclass(frozen=True)
class LogNormal(Jitter):
    """`lognormal:SIGMA`: exp(sigma z - sigma^2/2), z standard normal; sigma is that of the logarithm."""

    sigma: float

    def __post_init__(self) -> None:
        _check("lognormal", "sigma", self.sigma, 0.0, WIDEST)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        return _columns(workers, seed, lambda rng: rng.lognormal(-(self.sigma**2) / 2, self.sigma, steps))


@dataclass(frozen=True)
class Gamma(Jitter):
    """`gamma:SIGMA`: gamma with mean 1 and standard deviation sigma (shape 1/sigma^2)."""

    sigma: float

    def __post_init__(self) -> None:
        _check("gamma", "sigma", self.sigma, 0.0, WIDEST)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        if self.sigma < 1e-6:  # the shape 1/sigma^2 would overflow
            return np.ones((steps, workers))
        return _columns(workers, seed, lambda rng: rng.gamma(self.sigma**-2, self.sigma**2, steps))


@dataclass(frozen=True)
class SlowWorker(Jitter):
    """`slow-worker:FACTOR[@WORKER]`: one worker (the last, unless named) always takes factor times the mean."""

    factor: float
    worker: int = -1

    def __post_init__(self) -> None:
        _check("slow-worker", "factor", self.factor, 1.0, SLOWEST)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        if not -1 <= self.worker < workers:
            raise InputError(f"slow-worker names worker {self.worker}, but there are workers 0 to {workers - 1}")
        table = np.ones((steps, workers))
        table[:, self.worker] = self.factor
        return table


@dataclass(frozen=True)
class NowAndThen(Jitter):
    """`now-and-then:FACTOR:P`: in each step, with probability p, one random worker takes factor times the mean."""

    factor: float
    p: float

    def __post_init__(self) -> None:
        _check("now-and-then", "factor", self.factor, 1.0, SLOWEST)
        _check("now-and-then", "probability", self.p, 0.0, 1.0)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        happens, who = np.random.default_rng([seed]).random((steps, 2)).T
        table = np.ones((steps, workers))
        hit = np.flatnonzero(happens < self.p)
        table[hit, (who[hit] * workers).astype(int)] = self.factor
        return table


@dataclass(frozen=True)
class PerWorker(Jitter):
    """`per-worker:1,1,2`: worker w always takes `means[w]` times the mean (workers beyond the list start over)."""

    means: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.means:
            raise InputError("per-worker needs at least one mean, got none; write e.g. per-worker:1,1,2")
        for mean in self.means:
            _check("per-worker", "mean", mean, 0.0, SLOWEST)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        return np.tile(np.resize(np.array(self.means, dtype=float), workers), (steps, 1))


@dataclass(frozen=True)
class Replay(Jitter):
    """`replay:FILE`: recorded times over their mean, repeated as often as needed.

    One column: every worker replays it from its own starting point, drawn from the seed. Several columns: worker w
    replays column w.
    """

    times: tuple[tuple[float, ...], ...]  # rows: steps

    def __post_init__(self) -> None:
        if not self.times or len({len(row) for row in self.times}) != 1 or not self.times[0]:
            raise InputError("a replay needs a number, or equally many numbers, for every step; check the recording")
        for row in self.times:
            for value in row:
                _check("replay", "time", value, 0.0, SLOWEST)
        if not any(value > 0 for row in self.times for value in row):
            raise InputError("a replay needs a time above 0, got zeros only; check the recording")

    @classmethod
    def from_file(cls, path: str | Path) -> Replay:
        """Read a JSON list (numbers, or one list per step), or text (one line per step, columns by comma or space)."""
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(LONGEST + 1)
        except (OSError, ValueError) as error:  # a ValueError: no text, or no path
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read the recording {path!s:.100} ({reason}); pass replay:FILE") from None
        if len(text) > LONGEST:
            raise InputError(f"the recording {path!s:.100} is longer than {LONGEST} characters; record fewer steps")
        try:
            if text.lstrip().startswith("["):
                rows = [row if isinstance(row, list) else [row] for row in json.loads(text)]
            else:
                rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
            return cls(tuple(tuple(float(value) for value in row) for row in rows))
        except InputError:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(
                f"the recording {path} must hold numbers ({error!s:.100}); write one step per line"
            ) from None

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        recorded = np.array(self.times, dtype=float)
        recorded /= recorded.mean()
        length, columns = recorded.shape
        if columns == 1:
            starts = [int(np.random.default_rng([seed, w]).integers(length)) for w in range(workers)]
            return np.stack([recorded[(np.arange(steps) + start) % length, 0] for start in starts], axis=1)
        if columns < workers:
            raise InputError(f"the recording has {columns} workers, {workers} are asked for; record more or use fewer")
        return recorded[np.arange(steps) % length, :workers]


@dataclass(frozen=True)
class Product(Jitter):
    """`A+B`: both at once, e.g. `lognormal:0.3+slow-worker:4`; the multipliers are multiplied."""

    parts: tuple[Jitter, ...]

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        table = np.ones((steps, workers))
        for index, part in enumerate(self.parts):
            table *= part.sample(workers, steps, seed + 1_000_003 * index)  # parts must not share their draws
        return table


@dataclass(frozen=True)
class ComputeTime:
    """The compute time of a step in seconds: a mean and its jitter."""

    mean: float
    jitter: Jitter = Constant()

    def __post_init__(self) -> None:
        _check("compute time", "mean", self.mean, 0.0)

    def sample(self, workers: int, steps: int, seed: int = 0) -> Table:
        """Return seconds, shape [steps, workers]."""
        return self.mean * self.jitter.sample(workers, steps, seed)


def _columns(workers: int, seed: int, draw: Callable[[np.random.Generator], Table]) -> Table:
    return np.stack([draw(np.random.default_rng([seed, worker])) for worker in range(workers)], axis=1)


def _check(kind: str, name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        rule = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise InputError(f"{kind}: the {name} must be {rule} and finite, got {value:g}; see {EXAMPLES[kind]}")


EXAMPLES = {
    "none": "none",
    "gaussian": "gaussian:0.2",
    "lognormal": "lognormal:0.3",
    "gamma": "gamma:0.3",
    "slow-worker": "slow-worker:4 or slow-worker:4@2",
    "now-and-then": "now-and-then:4:0.05",
    "per-worker": "per-worker:1,1,2",
    "replay": "replay:FILE",
    "compute time": "0.4",
}


def parse_jitter(text: str) -> Jitter:
    """Parse a jitter: one of the forms in `EXAMPLES`, or several joined by `+`."""
    if text.startswith("replay:"):
        return Replay.from_file(text.removeprefix("replay:"))
    parts = tuple(_parse_one(part.strip()) for part in text.split("+"))
    return parts[0] if len(parts) == 1 else Product(parts)


def _parse_one(text: str) -> Jitter:
    kind, _, rest = text.partition(":")
    kinds = [k for k in EXAMPLES if k != "compute time"]
    if kind not in kinds:
        near = difflib.get_close_matches(kind, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(EXAMPLES[k] for k in kinds)}"
        raise InputError(f"unknown jitter {text!r:.60}; {hint}")
    try:
        if kind == "none" and not rest:
            return Constant()
        if kind == "slow-worker":
            factor, at, worker = rest.partition("@")
            if at and int(worker) < 0:
                raise ValueError
            return SlowWorker(float(factor), int(worker) if at else -1)
        if kind == "now-and-then":
            factor, p = rest.split(":")
            return NowAndThen(float(factor), float(p))
        if kind == "per-worker":
            return PerWorker(tuple(map(float, rest.split(","))))
        if kind == "replay":
            return Replay.from_file(rest)
        simple: dict[str, Callable[[float], Jitter]] = {"gaussian": Gaussian, "lognormal": LogNormal, "gamma": Gamma}
        return simple[kind](float(rest))
    except InputError:
        raise
    except (ValueError, KeyError, OverflowError):
        raise InputError(f"cannot read the jitter {text!r:.60}; write it like {EXAMPLES[kind]}") from None
