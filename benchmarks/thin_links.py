"""Step time and bytes on thin links: DDP, local steps with an all-reduce, and gossip with small messages.

    python benchmarks/thin_links.py --out benchmarks/records/thin-links        # about 30 minutes; resumes

Four nodes of two workers, a model of 4 MB and 0.4 s of compute per step, links of 50, 10, 5 and 1 Mbit/s. On every link
all rows are measured in turn, twice (at 5 and 1 Mbit/s once). A sample during which the cores were saturated or packets
were dropped is measured again by the same command. Gossamer and torch choose their buckets. `f` is the number of
fragments: a step exchanges 1/f of the model. `exact 1/64` is an exact average of all workers every 64 steps, which
renews the anchor of the int8 and int4 wires; the other int8 and int4 rows never renew it. localsgd and diloco are
torchft's, with an all-reduce every 8 steps. Bytes are counted by the kernel, headers included; the limit is
max(compute, bytes / bandwidth).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.lab import LabCluster
from gossamer.lab.bench import Setup
from gossamer.lab.bench.stats import step_seconds, traffic
from gossamer.lab.bench.worker import MethodRun, work
from gossamer.lab.cpu import SATURATED
from gossamer.lab.workers import WorkerPool
from gossamer.predict.methods import DILOCO_LR, DILOCO_MOMENTUM, parse
from gossamer.report.plots.style import new_figure, save
from gossamer.report.record import environment, write_record

LOCAL = 8  # steps between the all-reduces of localsgd and diloco
AVERAGED = 64
PERIOD = 4  # of the topology, in rounds


class Row(NamedTuple):
    method: str
    fragments: int = 1
    exact: bool = False  # an exact average every AVERAGED steps

    @property
    def name(self) -> str:
        fragments = f" f={self.fragments}" if self.fragments > 1 else ""
        return f"{self.method}{fragments}{f' exact 1/{AVERAGED}' if self.exact else ''}"

    @property
    def local(self) -> bool:
        return self.method in ("localsgd", "diloco")

    @property
    def gossips(self) -> bool:
        return self.method.startswith("dadam")

    @property
    def period(self) -> int:
        """Steps after which the exchanges repeat."""
        return AVERAGED if self.exact else LOCAL if self.local else PERIOD * self.fragments if self.gossips else 1

    def options(self) -> dict[str, Any]:
        if self.method == "diloco":
            return {"every": LOCAL, "lr": DILOCO_LR, "momentum": DILOCO_MOMENTUM}
        if self.method == "localsgd":
            return {"every": LOCAL}
        wanted = {"fragments": self.fragments, "average_every": AVERAGED if self.exact else 0}
        return {name: value for name, value in wanted.items() if value > 1}


EVERYWHERE = [
    Row("ddp"),
    Row("ddp:bf16"),
    Row("localsgd"),
    Row("diloco"),
    Row("dadam:aer"),
    Row("dadam:aer:bf16"),
    Row("dadam:aer:int8"),
    Row("dadam:aer:int4"),
    Row("dadam:aer", 4),
    Row("dadam:aer:int8", 4),
    Row("dadam:aer:int4", 4),
    Row("dadam:aer:int4", 8),
]
ROWS = {
    50: EVERYWHERE,
    10: [*EVERYWHERE, Row("dadam:aer:int8", 8, exact=True), Row("dadam:aer:int4", 8, exact=True)],
    5: EVERYWHERE,
    1: EVERYWHERE,
}
STEPS = {50: (3, 8), 10: (2, 6), 5: (1, 4), 1: (1, 2)}  # warm-up, measured
REPEATS = {50: 2, 10: 2, 5: 1, 1: 1}


def measure(pool: WorkerPool, setup: Setup, row: Row, link: int) -> dict[str, Any]:
    warmup, steps = STEPS[link]
    steps = -(-steps // row.period) * row.period  # whole periods, so that every row has its share of exchanges
    warmup = LOCAL if row.local else max(warmup, row.fragments)
    table = setup.table(warmup + steps, 0)
    columns = tuple(tuple(map(float, column)) for column in table.T)
    run = MethodRun(
        parse(row.method),
        setup,
        columns,
        steps,
        warmup,
        timeout=900.0,
        options=row.options(),
    )
    answers = pool.run(work, run, timeout=1800)
    moved = traffic(run.method, setup, answers, run.options.get("every", 1))
    assert moved is not None
    seconds = step_seconds(answers)
    use = max(a["cpu_use"] for a in answers)
    return {
        "link_mbit": link,
        "row": row.name,
        "step_s": seconds,
        "bytes": moved.busiest,
        "cpu_use": use,
        "saturated": use > SATURATED,
    }


def valid(sample: dict[str, Any]) -> bool:
    return not sample["saturated"] and not sample["dropped"]


def summary(samples: list[dict[str, Any]], compute: float) -> str:
    lines = []
    for link in ROWS:
        here = [s for s in samples if s["link_mbit"] == link]
        if not here:
            continue
        lines += [f"**{link} Mbit/s**", "", "| | step, s | kB per step and node | limit, s | times the limit |"]
        lines.append("|---|---|---|---|---|")
        for name in dict.fromkeys(s["row"] for s in here):
            every = [s for s in here if s["row"] == name]
            mine = [s for s in every if valid(s)] or every
            step, size = (statistics.fmean(s[key] for s in mine) for key in ("step_s", "bytes"))
            limit = max(compute, size * 8 / (link * 1e6))
            invalid = not valid(mine[0])
            times = f"{step / limit:.2f}{' INVALID' if invalid else ''}"
            lines.append(f"| {name} | {step:.3f} | {size / 1e3:.0f} | {limit:.3f} | {times} |")
        lines.append("")
    return "\n".join(lines)


def dropped(cluster: LabCluster) -> int:
    return sum(node["dropped"] for node in cluster.traffic() or ())


def setup_of(link: int) -> Setup:
    return Setup(per_node=(2, 2, 2, 2), link=f"{link}mbit", compute=0.4, jitter="none", model_mb=4.0)


def picture(samples: list[dict[str, Any]], path: Path) -> None:
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    shown = ["ddp", "ddp:bf16", "diloco", "dadam:aer", "dadam:aer:int8", "dadam:aer:int8 f=4", "dadam:aer:int4 f=8"]
    for name in shown:
        at = [link for link in ROWS if any(s["link_mbit"] == link and s["row"] == name for s in samples)]
        means = [
            statistics.fmean(s["step_s"] for s in samples if (s["link_mbit"], s["row"]) == (link, name)) for link in at
        ]
        axes.plot(at, means, marker="o", label=name)
    axes.axhline(0.4, color="0.6", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="link of every node (Mbit/s)", ylabel="seconds per step")
    axes.set_xticks(list(ROWS), [str(link) for link in ROWS])
    axes.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--links", default="50,10,5,1", help="Mbit/s, separated by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    raw, before = args.out / "samples.jsonl", environment()
    samples = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    for link in map(int, args.links.split(",")):
        setup = setup_of(link)
        with setup.cluster() as cluster, cluster.pool() as pool:
            for repeat in range(REPEATS[link]):
                for row in ROWS[link]:
                    if sum((s["link_mbit"], s["row"]) == (link, row.name) and valid(s) for s in samples) > repeat:
                        continue
                    earlier = dropped(cluster)
                    sample = measure(pool, setup, row, link)
                    sample["dropped"] = dropped(cluster) - earlier
                    samples.append(sample)
                    with raw.open("a") as file:
                        file.write(json.dumps(sample) + "\n")
                    print(
                        f"{link} Mbit/s {row.name}: {sample['step_s']:.3f} s, {sample['bytes'] / 1e3:.0f} kB",
                        flush=True,
                    )
    picture(samples, args.out / "thin-links.svg")
    write_record(
        args.out,
        data={"samples": samples, "local_steps": LOCAL, "average_every": AVERAGED},
        summary=f"![Step time against the link](thin-links.svg)\n\n{summary(samples, setup_of(10).compute)}",
        note="4 nodes of 2 workers, 4 MB, 0.4 s of compute.",
        environment=before,
    )


if __name__ == "__main__":
    main()
