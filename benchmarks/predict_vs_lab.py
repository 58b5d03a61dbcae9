"""Predictions from a probed cluster against measurements in the lab, on settings that were not used for calibration.

    python benchmarks/predict_vs_lab.py --out benchmarks/records/predict-vs-lab

For each link rate the lab's links are probed once, as `gossamer probe` does; the step time of every method is predicted
from that and then measured. The record has every error, the median and the worst one, and for every two methods that
differ by more than 10 % whether their order was right.
"""

import argparse
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.jobs.probe import lab_worker as probe_worker
from gossamer.lab.bench import BenchPlan, Setup, run_bench
from gossamer.predict.methods import parse
from gossamer.predict.predict import predict
from gossamer.predict.probed import cluster_from_probe
from gossamer.report.plots.style import method_styles, new_figure, save
from gossamer.report.record import environment, write_record

RATES = ("50mbit", "150mbit", "600mbit")
JITTERS = ("none", "lognormal:0.3")
METHODS = ("ddp", "dadam:aer", "dadam:exp", "dadam:ring")
DDP_BUCKET_MB = 0.5  # DDP at its best in these settings


def measure(setup: Setup, method: str, steps: int, repeats: int) -> dict[str, Any]:
    bucket = DDP_BUCKET_MB if method == "ddp" else None
    plan = BenchPlan(steps=steps, repeats=repeats, bucket_mb=bucket, sweep_steps=0)
    found: dict[str, Any] = run_bench(setup, [parse(method)], plan)["results"][0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--note", default="")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    before, console = environment(), Console()
    rows: list[dict[str, Any]] = []
    probes: dict[str, Any] = {}
    for rate in RATES:
        base = Setup(link=rate)
        with base.cluster() as lab:
            probes[rate] = lab.run(probe_worker, 0.5, timeout=600)[0]
        for jitter in JITTERS:
            setup = Setup(link=rate, jitter=jitter)
            described = cluster_from_probe(probes[rate], {"seconds": setup.compute, "jitter": jitter}, setup.model_mb)
            described = described.changed(ddp={"bucket_mb": DDP_BUCKET_MB})
            for method in METHODS:
                predicted = predict(method, described, steps=400).step_time
                found = measure(setup, method, args.steps, args.repeats)
                row = {
                    "link": rate,
                    "jitter": jitter,
                    "method": method,
                    "predicted_ms": 1e3 * predicted,
                    "measured_ms": found["step_ms"],
                    "error": 1e3 * predicted / found["step_ms"] - 1,
                    "cpu_use": found["cpu_use"],
                    "valid": found["valid"],
                    "samples_ms": found["step_ms_samples"],
                }
                rows.append(row)
                console.print(
                    f"{rate:8} {jitter:14} {method:10} predicted {row['predicted_ms']:7.1f} ms, measured "
                    f"{row['measured_ms']:7.1f} ms, error {100 * row['error']:+5.1f} %, "
                    f"CPU {100 * row['cpu_use']:.0f} %{' INVALID' if row['valid'] is False else ''}",
                    markup=False,
                )
    data, summary = judge(rows)
    console.print(summary, markup=False)
    if args.out is not None:
        folder = write_record(
            args.out, data={**data, "rows": rows, "probes": probes}, summary=summary, note=args.note, environment=before
        )
        scatter(rows, folder / "scatter.svg")


def judge(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    errors = [abs(r["error"]) for r in rows]
    checked, wrong = 0, []
    for setting in sorted({(r["link"], r["jitter"]) for r in rows}):
        here = [r for r in rows if (r["link"], r["jitter"]) == setting]
        for a, b in combinations(here, 2):
            if max(a["measured_ms"], b["measured_ms"]) > 1.1 * min(a["measured_ms"], b["measured_ms"]):
                checked += 1
                if (a["measured_ms"] < b["measured_ms"]) != (a["predicted_ms"] < b["predicted_ms"]):
                    wrong.append([*setting, a["method"], b["method"]])
    lines = ["| link | jitter | method | predicted | measured | error | CPU |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r['link']} | {r['jitter']} | {r['method']} | {r['predicted_ms']:.0f} ms | {r['measured_ms']:.0f} ms | "
        f"{100 * r['error']:+.1f} % | {100 * r['cpu_use']:.0f} %{' INVALID' if r['valid'] is False else ''} |"
        for r in rows
    ]
    lines += [
        "",
        f"{len(rows)} settings: median error {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} %. "
        f"Order of two methods that differ by more than 10 %: right in {checked - len(wrong)} of {checked} pairs.",
    ]
    data = {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "pairs_checked": checked,
        "pairs_wrong": wrong,
    }
    return data, "\n".join(lines)


def scatter(rows: list[dict[str, Any]], path: Path) -> None:
    figure = new_figure(5, 5)
    axes = figure.subplots()
    for method, style in method_styles(METHODS).items():
        here = [r for r in rows if r["method"] == method]
        x, y = [r["measured_ms"] for r in here], [r["predicted_ms"] for r in here]
        axes.scatter(x, y, label=method, s=30, color=style.color, marker=style.marker)
    most = 1.1 * max(max(r["measured_ms"], r["predicted_ms"]) for r in rows)
    least = 0.9 * min(min(r["measured_ms"], r["predicted_ms"]) for r in rows)
    axes.plot([least, most], [least, most], color="0.6", linewidth=1, zorder=0)
    axes.fill_between([least, most], [0.9 * least, 0.9 * most], [1.1 * least, 1.1 * most], color="0.92", zorder=-1)
    axes.set(xscale="log", yscale="log", xlabel="measured in the lab (ms per step)", ylabel="predicted (ms per step)")
    axes.legend(title="band: ±10 %")
    save(figure, path)


if __name__ == "__main__":
    main()
