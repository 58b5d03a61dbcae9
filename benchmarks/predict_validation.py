"""Predicted against measured step times on settings that no number of the model was fitted to.

    python benchmarks/predict_validation.py                       # resumes; about an hour on two quiet cores
    python benchmarks/predict_validation.py --only 1,4 --out DIR  # some settings
    python benchmarks/predict_validation.py --finished            # writes the record from the rows so far
    python benchmarks/predict_validation.py --finished --again    # the same, predicted anew from the stored probes

The settings were drawn by a seed (`benchmarks/predict_settings.py`) and committed before the cost model was measured
or fitted. On every setting the lab is probed as `gossamer probe` does, the emulated step is measured without
communication, every row is predicted from that, and then all rows are measured in turn, twice. Results are appended to
`rows.jsonl` as they come, and a setting that is there is not repeated. The probes are stored too, so that a later model
can be judged by the same measurements (`--again`).

Rules, fixed before the first run:
- The measured time of a row is the mean of its repeats; its spread is (largest - smallest) / mean. A row with a spread
  above 10 % is measured a third time, and the two repeats that are closest count. If their spread is still above 10 %,
  or if packets were dropped, the row is listed but does not count.
- The order of two rows of a setting is checked if their measured times differ by more than 10 % and by more than the
  sum of their spreads.
- The advised row is the one with the least predicted time; it should be within 5 % of the least measured time.
- Targets: median error at most 5 %, worst at most 15 %, every order right, every advised row within 5 %.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gossamer.jobs.probe import lab_worker
from gossamer.lab.bench import Setup
from gossamer.lab.bench.predicted import Probed, probe
from gossamer.lab.bench.stats import step_seconds
from gossamer.lab.bench.worker import MethodRun, work
from gossamer.lab.workers import WorkerPool
from gossamer.predict.methods import parse
from gossamer.report.plots.style import new_figure, save
from gossamer.report.record import environment, write_record

RECORD = Path(__file__).parent / "records" / "predict-validation"
WARMUP, REPEATS, SEED = 3, 2, 0
NOISY, DIFFERENT, ADVISED = 0.10, 0.10, 0.05


def setup_of(setting: dict[str, Any]) -> Setup:
    link = setting["link_mbit"]
    return Setup(
        per_node=tuple(setting["per_node"]),
        link=None if link is None else f"{link}mbit",
        compute=setting["compute"],
        jitter=setting["jitter"],
        model_mb=setting["model_mb"],
        network="loopback" if link is None else "namespaces",
        busy=setting["compute_kind"] == "real",
    )


def run_of(setup: Setup, row: dict[str, Any], steps: int) -> MethodRun:
    table = setup.table(WARMUP + steps, SEED)
    columns = tuple(tuple(map(float, column)) for column in table.T)
    options = {k: row[k] for k, usual in (("every", 1), ("staleness", 0)) if row[k] != usual}
    return MethodRun(
        parse(row["method"]),
        setup,
        columns,
        steps,
        WARMUP,
        timeout=600.0,
        bucket_mb=row["bucket_mb"],
        options=options,
        gradients=row["gradients"],
    )


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    """Probe, predict and measure one setting."""
    setup = setup_of(setting)
    runs = [run_of(setup, row, steps_of(setup)) for row in setting["rows"]]
    with setup.cluster() as cluster, cluster.pool() as pool:
        probed = probe(setup, [r.method for r in runs], pool, lab_worker, SEED)
        predicted = [predict(probed, run) for run in runs]
        samples: list[list[float]] = [[] for _ in runs]
        for _ in range(REPEATS):
            for at, run in enumerate(runs):
                samples[at].append(timed(pool, run))
        for at, run in enumerate(runs):
            if spread(samples[at]) > NOISY:
                samples[at].append(timed(pool, run))
    rows = [
        {**row, "predicted": p, "samples": s} for row, p, s in zip(setting["rows"], predicted, samples, strict=True)
    ]
    where = {k: v for k, v in setting.items() if k != "rows"}
    return {**where, "rows": rows, "dropped": cluster.dropped, "probe": probed.links, "alone": dict(probed.alone)}


def predict(probed: Probed, run: MethodRun) -> float:
    """The step time for the compute times that the run has: over a few steps their mean is not that of the jitter."""
    setup = probed.setup
    with tempfile.TemporaryDirectory() as folder:
        if setup.jitter.startswith("lognormal"):
            times, drawn = Path(folder) / "times.json", np.array(run.seconds_of).T[run.warmup :]
            times.write_text(json.dumps(drawn.tolist()))
            setup = replace(setup, jitter=f"replay:{times}", compute=float(drawn.mean()))
        return replace(probed, setup=setup).step_seconds(
            run.method,
            bucket_mb=run.bucket_mb,
            options=run.options,
            gradients=run.gradients,
            steps=run.warmup + run.steps,
            seed=SEED,
        )


def again(found: dict[str, Any]) -> dict[str, Any]:
    """The setting with predictions by the present model, from the stored probe."""
    setup = setup_of(found)
    probed = Probed(setup, found["probe"], found["alone"])
    rows = [{**row, "predicted": predict(probed, run_of(setup, row, steps_of(setup)))} for row in found["rows"]]
    return {**found, "rows": rows}


def steps_of(setup: Setup) -> int:
    return min(12, max(5, round(3 / setup.compute)))


def timed(pool: WorkerPool, run: MethodRun) -> float:
    return step_seconds(pool.run(work, run, timeout=1200))


def spread(samples: list[float]) -> float:
    return (max(samples) - min(samples)) / statistics.fmean(samples)


def closest(samples: list[float]) -> list[float]:
    """The two repeats that are closest."""
    return min((list(pair) for pair in combinations(samples, 2)), key=spread)


def judged(found: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Apply the rules; return the numbers and the table."""
    lines = [
        "| setting | method | settings | predicted ms | measured ms | error | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    checked, wrong, far = 0, [], []
    for setting in found:
        rows = []
        for row in setting["rows"]:
            kept = closest(row["samples"])
            mean, noise = statistics.fmean(kept), spread(kept)
            counts = noise <= NOISY and not setting["dropped"]
            error = row["predicted"] / mean - 1
            rows.append({**row, "measured": mean, "noise": noise, "counts": counts})
            errors += [abs(error)] * counts
            lines.append(
                f"| {place(setting)} | {row['method']} | {options(row)} | {1e3 * row['predicted']:.0f} | "
                f"{1e3 * mean:.0f} | {error:+.1%} | {noise:.1%}{'' if counts else ', not counted'} |"
            )
        valid = [r for r in rows if r["counts"]]
        for a, b in combinations(valid, 2):
            low, high = sorted((a["measured"], b["measured"]))
            if high > (1 + DIFFERENT) * low and high - low > a["noise"] * a["measured"] + b["noise"] * b["measured"]:
                checked += 1
                if (a["measured"] < b["measured"]) != (a["predicted"] < b["predicted"]):
                    wrong.append([setting["index"], a["method"], b["method"]])
        if valid:
            chosen = min(valid, key=lambda r: r["predicted"])
            best = min(r["measured"] for r in valid)
            if chosen["measured"] > (1 + ADVISED) * best:
                far.append([setting["index"], chosen["method"], chosen["measured"] / best - 1])
    data = {
        "settings": len(found),
        "rows": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "pairs_checked": checked,
        "pairs_wrong": wrong,
        "advised_too_slow": far,
    }
    if errors:
        lines += [
            "",
            f"{len(found)} settings, {len(errors)} rows: median error {data['median_error']:.1%}, worst "
            f"{data['worst_error']:.1%} (targets 5 % and 15 %). Order of two methods right in {checked - len(wrong)} "
            f"of {checked} pairs. The advised row was within 5 % of the best in {len(found) - len(far)} of "
            f"{len(found)} settings.",
        ]
    return data, "\n".join(lines)


def place(s: dict[str, Any]) -> str:
    link = "loopback" if s["link_mbit"] is None else f"{s['link_mbit']} Mbit/s"
    per_node = "+".join(map(str, s["per_node"]))
    return f"{s['index']}: {per_node}, {link}, {s['compute']} s {s['compute_kind']}, {s['jitter']}, {s['model_mb']} MB"


def options(row: dict[str, Any]) -> str:
    named = {"bucket_mb": row["bucket_mb"], "every": row["every"], "staleness": row["staleness"]}
    usual = {"bucket_mb": None, "every": 1, "staleness": 0}
    said = [f"{k}={v:g}" for k, v in named.items() if v != usual[k]]
    return ", ".join([*said, "exact inside"] if row["gradients"] == "node" else said)


def scatter(found: list[dict[str, Any]], path: Path) -> None:
    figure = new_figure(5, 5)
    axes = figure.subplots()
    for kind, marker in (("sleep", "o"), ("real", "s")):
        here = [r for s in found if s["compute_kind"] == kind for r in s["rows"]]
        x = [1e3 * statistics.fmean(closest(r["samples"])) for r in here]
        axes.scatter(x, [1e3 * r["predicted"] for r in here], label=f"{kind} compute", s=22, marker=marker)
    low, high = axes.get_xlim()
    axes.plot([max(low, 1), high], [max(low, 1), high], color="0.6", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured in the lab (ms per step)", ylabel="predicted (ms per step)")
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="folder of rows.jsonl and of the record")
    parser.add_argument("--only", help="indices of settings, separated by commas")
    parser.add_argument("--finished", action="store_true", help="measure nothing; write the record")
    parser.add_argument("--again", action="store_true", help="predict anew from the stored probes")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    console, before = Console(emoji=False, soft_wrap=True), environment()
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "rows.jsonl"
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    known = {s["index"] for s in done}
    wanted = None if args.only is None else {int(i) for i in args.only.split(",")}
    for setting in json.loads((RECORD / "settings.json").read_text()):
        index = setting["index"]
        if args.finished or index in known or (wanted is not None and index not in wanted):
            continue
        found = measure(setting)
        done.append(found)
        with raw.open("a") as file:
            file.write(json.dumps(found) + "\n")
        console.print(judged([found])[1], markup=False)
    if args.again:
        done = [again(found) for found in done]
    data, table = judged(done)
    console.print(table, markup=False)
    if args.finished:
        write_record(args.out, data={**data, "results": done}, summary=table, note=args.note, environment=before)
        scatter(done, args.out / "scatter.svg")


if __name__ == "__main__":
    main()
