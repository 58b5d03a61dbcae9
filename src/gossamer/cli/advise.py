"""`gossamer advise`: whether gossip is faster on a cluster, with which settings, and what held a run up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.common import Json, N, Nodes, PerNode, command_app, print_json, print_rich, table
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.predict.advise import Advice, Noise, Row
    from gossamer.predict.cluster import ClusterSpec

app = command_app()

SHOWN, ALIKE = 16, 4
EXAMPLE = (
    "Examples: gossamer advise cluster.toml --model-mb 260 --json | gossamer advise --run runs/numbers | "
    "gossamer advise cluster.toml --run runs/numbers"
)


@app.command(epilog=EXAMPLE, no_args_is_help=False)
def advise(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="CLUSTER", help="A .toml or .json file, or a40, a100, t4; with --run also run folders."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The --out of train, compare or bench --trace: what held it up, how good?"),
    ] = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of the links between nodes, such as 25gbit.")
    ] = None,
    model_mb: Annotated[float | None, typer.Option(metavar="S", help="Parameters in MB (1e6 bytes).")] = None,
    worth: Annotated[
        float, typer.Option(metavar="SHARE", help="Smallest gain in time to the same loss that is worth leaving DDP.")
    ] = 0.1,
    steps: Annotated[
        int | None, typer.Option(help="Steps to simulate for each choice.", show_default="120; 60 beyond 64 workers")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the compute times.")] = 0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a web page: ranking, what-if sliders, lines to paste.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank everything you could choose for a cluster by the time to the same loss, and recommend one, or DDP.

    With --run alone, say what held a run up, and whether gossip will be as good as all-reduce, from its noise scale.
    With a cluster and --run, the noise scale of the run widens the range of the quality where the records say less.
    """
    folders = [] if run is None else _folders([run, *map(Path, what or ())])
    clusters = [w for w in what or () if run is None or _names_cluster(Path(w))]
    if len(clusters) > 1:
        raise InputError(
            f"advise takes one cluster, got {', '.join(clusters)}; pass one, or several folders with --run"
        )
    if not 0 <= worth < 1:
        raise InputError(f"--worth is a share of the time between 0 and 1, got {worth:g}; pass for example 0.1")
    asked = {"--nodes": nodes, "--per-node": per_node, "--n": n, "--model-mb": model_mb, "--link": link}
    if not clusters:
        if run is None:
            raise InputError(
                "nothing to advise on; pass a cluster (a file, a40, a100 or t4) to predict the speed, or --run DIR to "
                "learn what held a run up and whether gossip will be as good"
            )
        unused = [name for name, value in asked.items() if value is not None]
        if html is not None:
            raise InputError(
                f"--html {html} shows advice for a cluster, but only --run {run} was given; name a cluster"
            )
        if unused:
            raise InputError(
                f"{', '.join(unused)} describes a cluster, but only --run {run} was given; name a cluster as well"
            )
        _runs(folders, as_json)
        return
    from gossamer.predict.advise import advise as make

    noise = _noise(folders) if run is not None else None
    described = _cluster(clusters[0], nodes, per_node, n, link, model_mb)
    advice = make(described, steps=steps, seed=seed, worth=worth, noise=noise)
    if html is not None:
        _write_page(html, advice, described, seed, worth)
    if as_json:
        print_json(advice.to_dict())
        return
    _print(advice)
    if html is not None:
        typer.echo(f"page: {html}")


def _write_page(path: Path, advice: Advice, cluster: ClusterSpec, seed: int, worth: float) -> None:
    from gossamer.predict.what_if import what_if
    from gossamer.report.advise_page import write_advice

    name = f"{cluster.name or 'cluster'}, {cluster.layout}, model of {cluster.model.mb:g} MB"
    write_advice(path, advice.to_dict(), what_if(cluster, advice, seed=seed, worth=worth), name)


def _cluster(
    source: str, nodes: str | None, per_node: str | None, n: str | None, link: str | None, model_mb: float | None
) -> ClusterSpec:
    from gossamer.cli.simulate import cluster_from
    from gossamer.lab.shaping import parse_rate
    from gossamer.predict.cluster import LinkSpec, load

    if link is None:
        return cluster_from(source, nodes, per_node, n, None, model_mb)
    rate = parse_rate(link)
    if rate is None:
        raise InputError(f"--link {link!r} is no rate; write for example --link 25gbit")
    known = load(source, model_mb)
    latency = known.links.inter.latency_us if known.links.inter is not None else 50.0
    inter = LinkSpec(bandwidth_gbps=rate / 1e9, latency_us=latency)
    return cluster_from(known.changed(links={"inter": inter, "pairs": ()}), nodes, per_node, n, None, model_mb)


def _folders(paths: list[Path]) -> list[Path]:
    """The folders of runs among the arguments, also where the shell has expanded `DIR/*` to files beside folders."""
    inside = dict.fromkeys(path.parent for path in paths if path.name == "config.json" and path.is_file())
    return list(inside) or [path for path in paths if path.is_dir()] or paths[:1]


def _names_cluster(path: Path) -> bool:
    """Whether an argument beside --run is a cluster: a description, or a name that is no file or folder of a run."""
    if path.suffix == ".json" and path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and "links" in found
    return path.suffix == ".toml" or not path.exists()


def _varied(rows: list[Row]) -> list[Row]:
    """The best rows, at most three of a kind, so that topologies with equal times do not hide other choices."""
    count: Counter[tuple[str, str]] = Counter()
    kept: list[Row] = []
    for r in rows:
        kind = (r.choice.algorithm, r.choice.gradients)
        count[kind] += 1
        if r.choice.ddp or (count[kind] <= ALIKE and len(kept) < SHOWN):
            kept.append(r)
    return kept


def _options(row: Row) -> str:
    named = row.choice.options
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in named.items())


def _print(advice: Advice) -> None:
    from rich.text import Text  # a method's colons are not emoji

    chosen = advice.recommendation
    low, high = chosen["gain_range"]
    gain = f"gains {chosen['gain']:.0%} (between {low:.0%} and {high:.0%}) in the time to the same loss"
    kept = chosen["method"].startswith("ddp")
    head = f"{chosen['verdict']}: {chosen['method']}" if kept else f"{chosen['method']}: {gain}"
    rows = table("choice", "ms", "saving", "of fp32", "MB sent", "to 1e-3", "× steps", "by", "score", "settings")
    for r in _varied(advice.shortest()):
        q = r.quality
        worth = "1" if q.high == 1 else f"{q.value:.2f}-{q.high:.2f}"
        mixed = "" if r.seconds_to_1e3 is None else f"{r.seconds_to_1e3:.2g} s"
        cells = (f"{r.step_time * 1e3:.1f}", f"{r.saving:.0%}", f"{r.saving_fp32:.0%}", f"{r.bytes_between / 1e6:.3g}")
        rows.add_row(Text(r.method), *cells, mixed, worth, q.basis, f"{r.score * 1e3:.1f}", _options(r))
    changes = table("if there were", "ddp ms", "best gossip", "ms", "gain", "")
    for s in advice.sensitivity:
        times = f"{s['ddp_step_time'] * 1e3:.1f}", f"{s['step_time'] * 1e3:.1f}"
        verdict = "go" if s["go"] else "keep DDP"
        changes.add_row(s["if"], times[0], Text(s["method"]), times[1], f"{s['gain']:.0%}", verdict)
    print_rich(Text(head, style="bold"), Text(chosen["why"]))
    typer.echo("\n" + "\n".join(f"    {line}" for line in chosen["lines"]) + "\n")  # never wrapped, to be copied
    print_rich(Text(chosen["rate"]))
    if chosen["as_good_within_2_percent"]:
        print_rich(Text(f"As good within 2 %: {'; '.join(chosen['as_good_within_2_percent'])}."))
    for note in advice.notes:
        print_rich(Text(f"Note: {note}."))
    print_rich(
        f"The best of {len(advice.table)}. saving: against the best all-reduce; of fp32: against DDP in fp32; MB sent: "
        "by a node to other nodes per step; to 1e-3: until differences between workers are a thousandth; × steps: "
        "steps to the loss of all-reduce, expected and at worst; by: a record that measured it, the rule between or "
        "beyond the records, or with a part that is assumed; score = ms × steps:",
        rows,
        "What would change the answer:",
        changes,
    )


def _noise(folders: list[Path]) -> Noise:
    """What the noise scale of the user's own runs predicts, by kind of gradients."""
    from gossamer.predict.quality import predict_quality
    from gossamer.report.noise import NOT_MEASURED, measured
    from gossamer.report.runs import find_runs, grouped

    found = [noise for folder in folders for noise in measured(grouped(find_runs(folder).runs))]
    if not found:
        raise InputError(f"{folders[0]}: {NOT_MEASURED}")
    first = found[0]
    everyone, nodes = first.global_batch, len(first.per_node)
    made = {"worker": predict_quality(first.scale, first.worker_batch, everyone)}
    if nodes > 1:
        made["node"] = predict_quality(first.scale, everyone / nodes, everyone, exact_inside=True)
    return made


def _runs(folders: list[Path], as_json: bool) -> None:
    """Say what held runs up, and predict the quality from the noise scale that they have measured."""
    from gossamer.report.held_up import held_up_in
    from gossamer.report.noise import NOT_MEASURED, measured
    from gossamer.report.runs import find_runs, grouped

    waits: list[dict[str, Any]] = []
    advice: list[dict[str, Any]] = []
    alone = False
    for folder in folders:
        waits += [found.to_dict() for found in held_up_in(folder)]
        if any(folder.rglob("config.json")) or not waits:
            found = measured(grouped(find_runs(folder).runs))
            alone = alone or any(noise.workers == 1 for noise in found)
            advice += [noise.to_dict() for noise in found if noise.workers > 1]
    if not waits and not advice:
        if alone:
            raise InputError(
                f"{folders[0]} was trained by a single worker; gossip takes several: add --virtual 4 or --workers 4"
            )
        raise InputError(f"{folders[0]}: {NOT_MEASURED}")
    if as_json:
        print_json({"folder": str(folders[0]), "held_up": waits, "advice": advice})
        return
    for each in waits:
        print_rich(f"[bold]{each['run']}[/]: {each['sentence']}")
        if each["change"]:
            print_rich(f"  {each['change']}")
    for each in advice:
        print_rich(each["noise"], f"[bold]{each['sentence']}[/]")
