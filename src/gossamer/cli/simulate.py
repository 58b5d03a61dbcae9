"""`gossamer simulate`: predicted step times, timelines and scaling curves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import (
    MAX_WORKERS,
    Json,
    N,
    Nodes,
    PerNode,
    command_app,
    layout_from,
    print_json,
    print_rich,
    table,
)
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.predict.cluster import ClusterSpec
    from gossamer.predict.methods import Method
    from gossamer.predict.predict import Setting
    from gossamer.predict.simulator import ExchangePolicy, Result
    from gossamer.topology import Layout

TIE = 0.02  # predictions that differ by less have no order
app = command_app()

EXAMPLE = (
    "Examples: gossamer simulate --nodes 4 --per-node 4 --method dadam:aer --gamma 3 --omega 0.5 --sigma 0.2 | "
    "gossamer simulate --cluster a40 --methods ddp,dadam:exp,dadam:aer --html timeline.html | "
    "gossamer simulate --method a2cid2:ring --n 64 --consensus --scaling 8,16,32,64"
)


def _file(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="FILE", help=what)


@app.command(epilog=EXAMPLE)
def simulate(
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    method: Annotated[str | None, typer.Option(metavar="METHOD", help="NAME[:TOPOLOGY[:WIRE]].")] = None,
    methods: Annotated[str | None, typer.Option(metavar="LIST", help="Several methods, separated by commas.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A preset (a40, a100, t4) or a .toml or .json file.")
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="Without a cluster: all-reduce time, relative to the mean compute time.")
    ] = None,
    omega: Annotated[
        float, typer.Option(help="Time of a gossip exchange between nodes, relative to an all-reduce.")
    ] = 1.0,
    sigma: Annotated[
        float | None, typer.Option(help="Gaussian jitter of the compute time, relative to its mean.")
    ] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TEXT", help="Any jitter, e.g. lognormal:0.3.")] = None,
    model_mb: Annotated[float | None, typer.Option(metavar="S", help="Parameters in MB (1e6 bytes).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to simulate.", show_default="400")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the compute times.")] = 0,
    buckets: Annotated[int | None, typer.Option(help="Buckets per step.")] = None,
    stagger: Annotated[bool | None, typer.Option(help="Let bucket b follow the schedule at phase k+b.")] = None,
    hierarchical: Annotated[bool | None, typer.Option(help="Send across the slow links once per node.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Buckets exchanged at the same time.")] = None,
    staleness: Annotated[int, typer.Option(help="Steps that may proceed while a late exchange is in flight.")] = 0,
    every: Annotated[int, typer.Option(help="Steps between two exchanges.")] = 1,
    outer: Annotated[
        bool, typer.Option("--outer", help="An outer step at every exchange, which then has the next --every steps.")
    ] = False,
    fragments: Annotated[int, typer.Option(help="Exchange one of so many parts of the model at a time.")] = 1,
    average_every: Annotated[
        int, typer.Option(metavar="STEPS", help="Steps between exact averages over all workers, in fp32; 0 makes none.")
    ] = 0,
    atc: Annotated[bool, typer.Option("--atc", help="Adapt, then combine: no overlap.")] = False,
    rate: Annotated[
        float, typer.Option(help="Asynchronous methods: exchanges per worker and mean compute time.")
    ] = 1.0,
    scaling: Annotated[str | None, typer.Option(metavar="LIST", help="Also for these numbers of nodes: 2,4,8.")] = None,
    consensus: Annotated[
        bool,
        typer.Option("--consensus", help="Asynchronous methods: consensus distance; --scaling then lists workers."),
    ] = False,
    runs: Annotated[int, typer.Option(help="With --consensus: independent runs.")] = 16,
    epsilon: Annotated[float, typer.Option(help="With --consensus: relative distance to reach.")] = 0.1,
    trace: Annotated[Path | None, _file("--trace", "Write one method's timeline for Perfetto.")] = None,
    trace_steps: Annotated[int, typer.Option(help="Steps in timelines.")] = 8,
    html: Annotated[Path | None, _file("--html", "Write the timelines as a web page.")] = None,
    plot: Annotated[Path | None, _file("--plot", "Draw the timelines, or the scaling curve (.svg, .png).")] = None,
    contour: Annotated[
        Path | None, _file("--contour", "Draw the saving over γ and ω for three σ, by the method's topology.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict step times: on a described cluster, or from γ, ω and σ in units of the mean compute time."""
    from gossamer.predict.methods import parse_list
    from gossamer.predict.volume import volume

    if method and methods:
        raise InputError("--method and --methods exclude each other; put all methods into --methods")
    chosen = parse_list(methods or method or "dadam:aer")
    if not chosen:
        raise InputError(f"--methods {methods!r} names no method; write for example ddp,dadam:aer")
    if html is not None or plot is not None or contour is not None:
        from gossamer.report.plots import check_matplotlib

        check_matplotlib()
    if consensus:
        from gossamer.cli.consensus import consensus as study

        study(
            chosen,
            layout_from(nodes, per_node, n),
            units=steps,
            rate=rate,
            seed=seed,
            runs=runs,
            epsilon=epsilon,
            scaling=scaling,
            plot=plot,
            as_json=as_json,
        )
        return
    steps = 400 if steps is None else steps
    if trace is not None and len(chosen) > 1:
        raise InputError("--trace writes one method's timeline; pass one --method, or use --html for several")
    if contour is not None and gamma is None and cluster is None:
        gamma = 1.0  # the picture covers a range of γ
    setting = _setting(cluster, nodes, per_node, n, gamma, omega, sigma, jitter, model_mb)
    _check_averages(average_every, every, fragments)
    asked: dict[str, Any] = {"staleness": staleness, "every": every, "combine": "atc" if atc else "awc", "outer": outer}
    asked["average_every"] = average_every // every if every > 0 else 0  # the simulator counts exchanges
    named = {"buckets": buckets, "stagger": stagger, "hierarchical": hierarchical, "in_flight": in_flight}
    asked |= {k: v for k, v in named.items() if v is not None}
    spans = trace_steps if trace or html or (plot and not scaling) else 0

    def run(method: Method, setting: Setting, spans: int = 0) -> Result:
        from gossamer.predict.predict import predict

        policy = _policy(method, setting, fragments, asked)
        return predict(method, setting, steps=steps, seed=seed, policy=policy, rate=rate, trace_steps=spans)

    results = {m: run(m, setting, spans) for m in chosen}
    from gossamer.predict.methods import parse

    ddp = next((r for m, r in results.items() if str(m) == "ddp"), None) or run(parse("ddp"), setting)
    rows = [_row(m, r, ddp) | volume(m, r, setting, _policy(m, setting, fragments, asked)) for m, r in results.items()]
    notes = _notes(chosen, average_every)
    curve = _scaling(scaling, setting, chosen, run) if scaling else []
    _write(results, setting, trace, html, plot, curve)
    if contour is not None:
        _contour(contour, chosen, setting.layout, seed)
    if as_json:
        single = rows[0] if len(rows) == 1 else {}
        listed = {"methods": rows} if len(rows) > 1 else {}
        extra: dict[str, Any] = {"scaling": curve} if curve else {}
        extra |= {"near_tie": tied} if (tied := near_tie(rows)) else {}
        extra |= {"notes": notes} if notes else {}
        print_json(
            {**_describe(setting), "steps": steps, "seed": seed, "ddp_step_time": ddp.step_time}
            | single
            | listed
            | extra
        )
        return
    _print(setting, rows, curve, notes)


def near_tie(rows: list[dict[str, Any]]) -> list[str]:
    """Return the methods whose predicted times are so close to the least that their order says nothing, if several."""
    least = min(r["step_time"] for r in rows)
    found = [str(r["method"]) for r in rows if r["step_time"] <= (1 + TIE) * least]
    return found if len(found) > 1 else []


OWN = ("staleness", "every", "combine", "outer", "average_every")  # settings that Decent-DP does not have


def _policy(method: Method, setting: Setting, fragments: int, asked: dict[str, Any]) -> ExchangePolicy:
    """Return the exchanges that are asked for. Decent-DP exchanges in every step, whatever is asked."""
    from gossamer.predict.predict import default_policy

    if method.package == "decent-dp":
        asked = {name: value for name, value in asked.items() if name not in OWN}
    return replace(default_policy(setting, method, fragments), **asked)


def _check_averages(average_every: int, every: int, fragments: int) -> None:
    """Refuse exact averages that the engine refuses."""
    if average_every < 0:
        raise InputError(f"--average-every must not be negative, got {average_every}; 0 makes no exact averages")
    if average_every and every > 0 and average_every % every:
        raise InputError(
            f"--average-every counts steps and must be a multiple of --every {every}, got {average_every}; pass "
            f"{max(1, round(average_every / every)) * every}"
        )
    if 0 < average_every < every * fragments:
        raise InputError(
            f"--average-every {average_every} is less than the {every * fragments} steps in which all {fragments} "
            f"fragments are exchanged; pass at least {every * fragments}"
        )


def _notes(chosen: tuple[Method, ...], average_every: int) -> list[str]:
    """Say what is not charged."""
    from gossamer.predict.methods import ANCHORED

    wires = sorted({m.wire for m in chosen if m.wire in ANCHORED and not m.asynchronous})
    if not wires or average_every:
        return []
    return [
        f"{' and '.join(wires)}: no exact averages are charged, which such wires need; add --average-every 64, as "
        "gossamer advise does"
    ]


def _setting(
    cluster: str | None,
    nodes: str | None,
    per_node: str | None,
    n: str | None,
    gamma: float | None,
    omega: float,
    sigma: float | None,
    jitter: str | None,
    model_mb: float | None,
) -> Setting:
    from gossamer.predict.compute import parse_jitter
    from gossamer.predict.predict import Abstract

    if sigma is not None and jitter is not None:
        raise InputError(f"--sigma {sigma} is short for --jitter gaussian:{sigma}; pass one of them")
    text = jitter if jitter is not None else f"gaussian:{sigma}" if sigma is not None else None
    if text is not None:
        parse_jitter(text)
    if cluster is not None:
        if gamma is not None:
            raise InputError("--gamma and --cluster exclude each other; a cluster's gamma follows from its links")
        return cluster_from(cluster, nodes, per_node, n, text, model_mb)
    if gamma is None:
        raise InputError("what to simulate is missing; pass --cluster a40 (or a file), or --gamma with --omega")
    if model_mb is not None:
        raise InputError("--model-mb needs --cluster; with --gamma the model's size is part of gamma")
    return Abstract(layout_from(nodes, per_node, n), gamma, omega, text or "none")


def cluster_from(
    source: str | ClusterSpec,
    nodes: str | None,
    per_node: str | None,
    n: str | None,
    jitter: str | None,
    model_mb: float | None,
) -> ClusterSpec:
    """Load a preset or a file, and apply the options."""
    from gossamer.predict.cluster import load

    if model_mb is not None and not (math.isfinite(model_mb) and model_mb > 0):
        raise InputError(f"--model-mb must be a positive number of megabytes, got {model_mb}")
    cluster = load(source, model_mb) if isinstance(source, str) else source
    if nodes is not None or per_node is not None or n is not None:
        cluster = cluster.resized(_layout_on(cluster.layout, nodes, per_node, n))
    if jitter is not None:
        cluster = cluster.changed(compute={"jitter": jitter, "samples": None})
    if model_mb is not None:
        cluster = cluster.changed(model={"mb": model_mb, "source": "given"})
    return cluster


def _layout_on(own: Layout, nodes: str | None, per_node: str | None, n: str | None) -> Layout:
    """Return the layout of the options, with the cluster's own numbers where an option is missing."""
    if n is None and per_node is None and len(set(own.per_node)) == 1:
        per_node = str(own.per_node[0])
    if n is None and nodes is None and per_node is not None and "," not in per_node:
        nodes = str(own.nodes)
    return layout_from(nodes, per_node, n)


def _row(method: Method, result: Result, ddp: Result) -> dict[str, Any]:
    return {
        "method": str(method),
        "step_time": result.step_time,
        "saving": 1 - result.step_time / ddp.step_time,
        "compute_time": result.compute_time,
        "waiting": result.waiting,
        "exchanges_per_step": result.exchange_rate,
        **result.percentiles(),
    }


def _describe(setting: Setting) -> dict[str, Any]:
    from gossamer.predict.cluster import ClusterSpec
    from gossamer.predict.predict import derived

    layout = setting.layout
    base = {"workers": layout.n, "nodes": layout.nodes, "per_node": list(layout.per_node)}
    if isinstance(setting, ClusterSpec):
        return {"unit": "s", "cluster": setting.name, **base, **derived(setting)}
    return {
        "unit": "mean compute time",
        **base,
        "gamma": setting.gamma,
        "omega": setting.omega,
        "jitter": setting.jitter,
    }


def _scaling(text: str, setting: Setting, chosen: tuple[Method, ...], run: Any) -> list[dict[str, Any]]:
    from gossamer.predict.methods import parse
    from gossamer.topology import Layout

    try:
        counts = [int(c) for c in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise InputError(f"--scaling must list positive numbers of nodes, got {text!r:.60}; write for example 2,4,8")
    if max(counts) * max(setting.layout.per_node) > MAX_WORKERS:
        raise InputError(f"--scaling must stay below {MAX_WORKERS} workers, got {max(counts)} nodes; list fewer")
    local = setting.layout.per_node
    if len(set(local)) > 1:
        raise InputError(f"--scaling needs equal nodes, got {list(local)}; pass --per-node with one number")
    rows = []
    for m in counts:
        resized = setting.resized(Layout.of([local[0]] * m))
        ddp = run(parse("ddp"), resized)
        for method in chosen:
            result = ddp if str(method) == "ddp" else run(method, resized)
            row = _row(method, result, ddp)
            rows.append({"nodes": m, "workers": m * local[0], **{k: row[k] for k in ("method", "step_time", "saving")}})
    return rows


def _write(
    results: dict[Method, Result],
    setting: Setting,
    trace: Path | None,
    html: Path | None,
    plot: Path | None,
    curve: list[dict[str, Any]],
) -> None:
    from gossamer.predict.predict import predicted_trace
    from gossamer.trace import write_chrome

    traces = [predicted_trace(m, setting, r) for m, r in results.items()]
    unit = _describe(setting)["unit"]
    axis = None if unit == "s" else f"{unit}s"
    if trace is not None:
        write_chrome(traces[0], trace)
    if html is not None:
        from gossamer.report.plots import draw_timeline

        draw_timeline(traces, html, unit=axis)
    if plot is not None:
        from gossamer.report.plots import draw_scaling, draw_timeline

        if curve:
            lines: dict[str, list[tuple[int, float]]] = {}
            for row in curve:
                lines.setdefault(row["method"], []).append((row["workers"], row["step_time"]))
            draw_scaling(lines, plot, unit=unit)
        else:
            draw_timeline(traces, plot, unit=axis)


def _contour(path: Path, chosen: tuple[Method, ...], layout: Layout, seed: int) -> None:
    import numpy as np

    from gossamer.predict.closed_form import contour
    from gossamer.report.plots import draw_contours
    from gossamer.topology import build

    method = next((m for m in chosen if m.topology is not None), None)
    if method is None or method.topology is None:
        raise InputError("--contour needs a method with a topology; pass for example --method dadam:aer")
    topology = build(method.topology, layout)
    gammas, omegas = np.linspace(0.25, 4, 16), np.linspace(0.1, 1.2, 12)
    made = [contour(topology, gammas, omegas, sigma=s, steps=200, seed=seed) for s in (0.0, 0.1, 0.3)]
    draw_contours(made, path, title=f"{method.topology} over all-reduce, {layout}")


def _print(setting: Setting, rows: list[dict[str, Any]], curve: list[dict[str, Any]], notes: list[str]) -> None:
    from rich.text import Text  # a method's colons are not emoji

    facts = _describe(setting)
    seconds = facts["unit"] == "s"

    def time(value: float) -> str:
        return f"{value * 1e3:.1f}" if seconds else f"{value:.3f}"

    head = f"{setting.layout}; " + ("times in ms" if seconds else "times in mean computes") + "; "
    head += f"γ {facts['gamma']:.3g}, ω {facts['omega']:.3g}"
    head += (
        f", σ² {facts['sigma2']:.3g}, compute {time(facts['compute_seconds'])}" if seconds else f", {facts['jitter']}"
    )
    made = table("method", "step", "saving", "waiting", "median", "95 %", "99 %", *["MB sent"] * seconds, "mixes")
    for r in rows:
        cells = [time(r["step_time"]), f"{r['saving']:.1%}", f"{r['waiting']:.1%}"]
        cells += [time(r[k]) for k in ("p50", "p95", "p99")]
        cells += [f"{r['bytes_between'] / 1e6:.3g}"] if seconds else []
        made.add_row(Text(r["method"]), *cells, "" if r["contraction"] is None else f"{r['contraction']:.2g}")
    print_rich(Text(head), made)
    print_rich(
        Text(
            "MB sent: by a node to other nodes per step; " * seconds
            + "mixes: factor by which a step shrinks the distance between workers (0: averages become exact)."
        )
    )
    for note in notes:
        print_rich(Text(f"Note: {note}."))
    if tied := near_tie(rows):
        print_rich(Text(f"Within {TIE:.0%} of the fastest, so no order is claimed: {', '.join(tied)}."))
    if curve:
        grown = table("nodes", "workers", "method", "step time", "saving")
        for r in curve:
            entries = (
                str(r["nodes"]),
                str(r["workers"]),
                Text(r["method"]),
                time(r["step_time"]),
                f"{r['saving']:.1%}",
            )
            grown.add_row(*entries)
        print_rich(grown)
