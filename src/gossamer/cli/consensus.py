"""`gossamer simulate --consensus`: A2CiD2 and AD-PSGD on one graph, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cli.common import print_json, print_rich, table
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.predict.asynchronous import ConsensusCurve, ConsensusScaling
    from gossamer.predict.methods import Method
    from gossamer.topology import Layout

POINTS = 200  # of a curve in the output
MAX_WORKERS = 4096  # with more workers a study in plain Python takes hours
MAX_RUNS, MAX_UNITS = 4096, 1_000_000
LONGEST = 2000.0  # time units without --steps
SETTLED = 4.0  # relaxation times of AD-PSGD, before the half that counts as stationary


def consensus(
    methods: tuple[Method, ...],
    layout: Layout,
    *,
    units: int | None,
    rate: float,
    seed: int,
    runs: int,
    epsilon: float,
    scaling: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from gossamer.predict import asynchronous as study
    from gossamer.topology import build
    from gossamer.topology.a2cid2 import rates_of

    name = _topology(methods)
    if layout.n > MAX_WORKERS:
        raise InputError(f"--consensus simulates every exchange of at most {MAX_WORKERS} workers, got {layout.n}")
    if not 0 < rate < float("inf"):
        raise InputError(f"--rate must be a positive number of exchanges per gradient, got {rate}; 1 is usual")
    if not 1 <= runs <= MAX_RUNS:
        raise InputError(f"--runs must be from 1 to {MAX_RUNS} independent runs, got {runs}; 16 are usual")
    if seed < 0:
        raise InputError(f"--seed must not be negative, got {seed}; pass for example 0")
    if not 0 < epsilon < 1:
        raise InputError(f"--epsilon must be between 0 and 1, got {epsilon}; 0.1 is usual")
    if units is not None and not 2 <= units <= MAX_UNITS:
        raise InputError(f"--steps must be from 2 to {MAX_UNITS} units of time here, got {units}")
    topology = build(name, layout)
    constants = rates_of(topology)
    relaxation = (constants.chi1 or 1.0) / rate
    horizon = float(units) if units is not None else min(LONGEST, max(100.0, 2 * SETTLED * relaxation))
    curves: dict[str, list[ConsensusCurve]] = {}
    for forcing in ("none", "noise", "constant", "quadratic"):
        curves[forcing] = [
            study.consensus_study(topology, a, forcing=forcing, units=horizon, rate=rate, runs=runs, seed=seed)
            for a in study.ALGORITHMS
        ]
    counts = _counts(scaling)
    from gossamer.topology import Layout

    grown = [build(name, Layout.flat(n)) for n in counts]
    scalings = (
        [study.consensus_scaling(grown, a, epsilon=epsilon, runs=runs, seed=seed) for a in study.ALGORITHMS]
        if grown
        else []
    )
    if plot is not None:
        from gossamer.report.plots import draw_consensus

        draw_consensus(curves, scalings, plot, title=f"{name}, {layout.n} workers, rate {rate:g}", workers=layout.n)
    facts: dict[str, Any] = {
        "topology": name,
        "workers": layout.n,
        "rate": rate,
        "chi1": constants.chi1,
        "chi2": constants.chi2,
        "eta": constants.eta,
        "alpha_tilde": constants.alpha_tilde,
        "time": horizon,
        "runs": runs,
        "seed": seed,
        "settled": horizon >= 2 * SETTLED * relaxation,
        "averaging": _averaging(curves["none"], epsilon),
        "stationary": {f: _stationary(c) for f, c in curves.items() if f != "none"},
        "scaling": [_row(s) for s in scalings],
    }
    if as_json:
        print_json({**facts, "curves": {f: {c.algorithm: _points(c) for c in pair} for f, pair in curves.items()}})
    else:
        _print(facts, epsilon)


def _topology(methods: tuple[Method, ...]) -> str:
    names = {m.topology for m in methods if m.asynchronous}
    if any(not m.asynchronous for m in methods) or len(names) != 1:
        raise InputError(
            f"--consensus compares ad-psgd with a2cid2 on one topology, got {', '.join(map(str, methods))}; write "
            "--method a2cid2:ring"
        )
    return str(names.pop())


def _counts(scaling: str | None) -> list[int]:
    if scaling is None:
        return []
    try:
        counts = [int(c) for c in scaling.split(",")]
    except ValueError:
        counts = []
    if len(set(counts)) < 2 or min(counts) < 2 or max(counts) > MAX_WORKERS:
        raise InputError(
            f"--scaling must list at least two numbers of workers from 2 to {MAX_WORKERS}, got {scaling!r}; write for "
            "example 8,16,32,64"
        )
    return sorted(set(counts))


def _points(curve: ConsensusCurve) -> dict[str, Any]:
    every = max(1, -(-len(curve.time) // POINTS))
    named = {"time": curve.time, "communications": curve.communications, "distance": curve.distance, "loss": curve.loss}
    return {k: v[::every].tolist() for k, v in named.items() if v is not None}


def _averaging(pair: list[ConsensusCurve], epsilon: float) -> dict[str, float | None]:
    """Return the exchanges until the distance of white values is `epsilon` of its start; None if never."""
    reached = {c.algorithm: c.communications_to(epsilon * c.distance[0]) for c in pair}
    return {a: value if value == value else None for a, value in reached.items()}


def _stationary(pair: list[ConsensusCurve]) -> dict[str, float]:
    values: dict[str, float] = {c.algorithm: c.stationary() for c in pair}
    return {**values, "ratio": values["a2cid2"] / values["ad-psgd"]}


def _row(s: ConsensusScaling) -> dict[str, Any]:
    return {
        "method": s.algorithm,
        "epsilon": s.epsilon,
        "workers": list(s.workers),
        "communications": list(s.communications),
        "exponent": s.exponent,
    }


def _print(facts: dict[str, Any], epsilon: float) -> None:
    from rich.text import Text

    print_rich(
        Text(
            f"{facts['topology']}, {facts['workers']} workers, {facts['runs']} runs of {facts['time']:g} mean gradient "
            f"times; χ1 {facts['chi1']:.4g}, χ2 {facts['chi2']:.4g}, η {facts['eta']:.4g}, α̃ {facts['alpha_tilde']:.4g}"
        )
    )
    made = table("", "ad-psgd", "a2cid2", "ratio")
    said = facts["averaging"]
    cells = ["not reached" if said[a] is None else f"{said[a]:.0f}" for a in ("ad-psgd", "a2cid2")]
    ratio = f"{said['a2cid2'] / said['ad-psgd']:.3f}" if None not in said.values() else ""
    made.add_row(f"exchanges until white values are {epsilon:g} as far apart", *cells, ratio)
    for forcing, name in (
        ("noise", "distance under i.i.d. noise"),
        ("constant", "distance under constant forcing"),
        ("quadratic", "distance on quadratics"),
    ):
        row = facts["stationary"][forcing]
        made.add_row(name, f"{row['ad-psgd']:.4g}", f"{row['a2cid2']:.4g}", f"{row['ratio']:.3f}")
    print_rich(made)
    if not facts["settled"]:
        print_rich(Text("The distances may still grow: pass more --steps for stationary ones."))
    if facts["scaling"]:
        grown = table("workers", *(s["method"] for s in facts["scaling"]))
        for k, n in enumerate(facts["scaling"][0]["workers"]):
            grown.add_row(str(n), *(f"{s['communications'][k]:.0f}" for s in facts["scaling"]))
        grown.add_row("grows as", *(f"n^{s['exponent']:.2f}" for s in facts["scaling"]))
        print_rich(Text(f"Exchanges in all until the slowest mode is {epsilon:g} of what it was"), grown)
