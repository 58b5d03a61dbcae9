"""`gossamer probe`: measure a job's links and compute times, and write the cluster file that predictions need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.common import Json, N, Nodes, PerNode, command_app, layout_from, print_json, print_rich, table
from gossamer.errors import InputError

app = command_app()


@app.command(
    epilog="Examples: gossamer probe --nodes 2 --per-node 2 --link 50mbit -o cluster.toml --model-mb 4\n\n"
    "torchrun --nproc-per-node 2 -m gossamer probe -o cluster.toml --compute compute.json"
)
def probe(
    out: Annotated[Path, typer.Option("-o", "--out", help="Cluster file to write (.toml).")] = Path("cluster.toml"),
    compute: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Seconds per step, a file of gossamer.probe(), or a trace folder."),
    ] = None,
    model_mb: Annotated[float | None, typer.Option(metavar="S", help="Parameters in MB (1e6 bytes).")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each bandwidth.")] = 0.5,
    nodes: Nodes = None,
    per_node: PerNode = None,
    n: N = None,
    link: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate of the links between nodes, in the lab.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure links, processors and all-reduce under a launcher (or in the lab), and write a cluster file."""
    from gossamer.comm.launcher import launched
    from gossamer.predict.probed import read_compute

    if not 0 < seconds <= 60:
        raise typer.BadParameter(f"must be between 0 and 60, got {seconds}", param_hint="--seconds")
    times = read_compute(compute)
    if launched():
        from gossamer.jobs.probe import measure_here

        rank, links = measure_here(seconds)
    else:
        if nodes is None and per_node is None and n is None:
            raise InputError(
                "probe measures the links between workers, and this is one process; start it under a launcher, for "
                "example torchrun --nproc-per-node 2 -m gossamer probe -o cluster.toml, or name workers to start on "
                "this machine, for example --n 2"
            )
        rank, links = 0, _measure_in_lab(layout_from(nodes, per_node, n).per_node, link, seconds)
    if rank == 0:
        _write(out, links, times, model_mb, as_json)


def _measure_in_lab(per_node: tuple[int, ...], link: str | None, seconds: float) -> dict[str, Any]:
    from gossamer.jobs.probe import lab_worker
    from gossamer.lab import LabCluster, LabUnavailable, why_unavailable

    if sum(per_node) == 1:
        raise InputError("probe measures the links between workers, and one worker has none; name at least two")
    if link and (reason := why_unavailable()):
        raise LabUnavailable(f"--link: {reason}, or leave --link out to measure loopback")
    with LabCluster(per_node=list(per_node), link=link, network="namespaces" if link else "loopback") as cluster:
        measured: dict[str, Any] = cluster.run(lab_worker, seconds, timeout=600)[0]
    return measured


def _write(out: Path, links: dict[str, Any], times: dict[str, Any], model_mb: float | None, as_json: bool) -> None:
    from gossamer.jobs.probe import file_text, said, write_kept
    from gossamer.predict.probed import cluster_from_probe

    cluster = cluster_from_probe(links, times, model_mb)
    kept = write_kept(out, file_text(cluster))
    if as_json:
        kept_as = None if kept is None else str(kept)
        print_json({"file": str(out), "kept": kept_as, "cluster": cluster.model_dump(mode="json"), "measured": links})
        return
    rows = table("link", "latency", "one connection", "all together")
    for sample in [*links["intra"], *links["inter"]]:
        a, b = sample["nodes"]
        rows.add_row(
            f"inside node {a}" if a == b else f"node {a} - node {b}",
            f"{sample['latency_s'] * 1e6:.0f} µs",
            f"{sample['flow_bytes_per_s'] * 8e-6:.1f} Mbit/s",
            f"{sample['link_bytes_per_s'] * 8e-6:.1f} Mbit/s ({sample['flows']})",
        )
    costs = table("GB of fp32 parameters per second", *links["processing"]["merge"])
    for name in ("encode", "merge"):
        rates = links["processing"][name]
        costs.add_row(name, *(f"{rates[w] / 1e9:.2g}" if w in rates else "-" for w in links["processing"]["merge"]))
    print_rich(rows, costs)
    for size_bytes, taken in (links["allreduce"] or {"seconds": {}})["seconds"].items():
        typer.echo(f"all-reduce of {int(size_bytes) / 2**20:8.3f} MiB: {taken * 1e3:9.2f} ms")
    for line in said(out, kept, cluster):
        typer.echo(line)
