"""`gossamer probe`: measure a job's links and compute times, and write the cluster file that predictions need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli.common import Json, N, Nodes, PerNode, command_app, layout_from, print_json, print_rich, table

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
    """Measure links and all-reduce under a launcher (or in the lab), and write a cluster file."""
    from gossamer.comm.launcher import launched
    from gossamer.predict.cluster import read_compute

    if not 0 < seconds <= 60:
        raise typer.BadParameter(f"must be between 0 and 60, got {seconds}", param_hint="--seconds")
    times = read_compute(compute)
    if launched():
        rank, links = _measure_here(seconds)
    else:
        rank, links = 0, _measure_in_lab(layout_from(nodes, per_node, n).per_node, link, seconds)
    if rank == 0:
        _write(out, links, times, model_mb, compute, as_json)


def _measure_here(seconds: float) -> tuple[int, dict[str, Any]]:
    from gossamer.comm.link_probe import probe_links
    from gossamer.comm.process_groups import join_world, leave_world

    rank, _ = join_world()
    links = probe_links(seconds).to_dict()
    leave_world()
    return rank, links


def _lab_worker(rank: int, seconds: float) -> dict[str, Any]:
    return _measure_here(seconds)[1]


def _measure_in_lab(per_node: tuple[int, ...], link: str | None, seconds: float) -> dict[str, Any]:
    from gossamer.lab import LabCluster, LabUnavailable, why_unavailable

    if link and (reason := why_unavailable()):
        raise LabUnavailable(f"--link: {reason}, or leave --link out to measure loopback")
    with LabCluster(per_node=list(per_node), link=link, network="namespaces" if link else "loopback") as cluster:
        measured: dict[str, Any] = cluster.run(_lab_worker, seconds, timeout=600)[0]
    return measured


def _write(
    out: Path, links: dict[str, Any], times: dict[str, Any], model_mb: float | None, compute: str | None, as_json: bool
) -> None:
    from gossamer.errors import InputError
    from gossamer.predict.cluster import cluster_from_probe, to_toml

    size = 100.0 if model_mb is None and "model_mb" not in times else model_mb
    cluster = cluster_from_probe(links, times, size)
    try:
        out.write_text(to_toml(cluster), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(out)!r}: {error.strerror}; choose another place with -o") from None
    if as_json:
        print_json({"file": str(out), "cluster": cluster.model_dump(mode="json"), "measured": links})
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
    print_rich(rows)
    for size_bytes, taken in links["allreduce_s"].items():
        typer.echo(f"all-reduce of {int(size_bytes) / 2**20:8.3f} MiB: {taken * 1e3:9.2f} ms")
    typer.echo(f"wrote {out}; next: gossamer advise {out}")
    if compute is None:
        typer.echo("compute.seconds is a guess (0.1): pass --compute, or edit the file")
    if size == 100.0 and model_mb is None:
        typer.echo("model.mb is a guess (100): pass --model-mb, or edit the file")
