"""The network falls into two halves for 30 seconds: what each half does, and what becomes of the model.

    python benchmarks/partition.py --out benchmarks/records/partition          # about 14 minutes

Two nodes of four workers train the task of `gossamer chaos` with `on_failure="continue"` for two minutes; after a third
of the time the link between the nodes loses every packet for 30 s. The half that reaches the directory goes on as a job
of four. The other half goes on too, and joins again when the link is back: its workers take the state of a member. The
same seeds run without a fault. The loss is within the noise if its mean is above that of the runs without a fault by no
more than their spread, the difference of the largest and the smallest. The workers make no collective call: without the
directory, each call would wait for the hard deadline.

Which state the job should continue with was decided by `merged`: eight workers that average exactly train as two
halves for as many steps, and then either all take the first half's state, or all take the mean of all eight.

With --out every run is added to `rows.jsonl` in that folder at once. The same command continues after an interruption:
it makes the runs that are missing, and again those on saturated cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gossamer.lab.bench.time_to_loss import INPUTS, Student, teacher
from gossamer.lab.chaos import ChaosConfig, Fault
from gossamer.lab.chaos.job import JobRecord, run_job
from gossamer.lab.chaos.log import last_steps
from gossamer.lab.chaos.verdict import stalls
from gossamer.lab.chaos.worker import final_loss, train
from gossamer.report.record import environment, write_record

HALVES = (4, 4)
RULES = ("no partition", "the first half's state", "the mean of all")


class Times(NamedTuple):
    """The seconds of a run, and when the partition begins and ends."""

    run: float
    begin: float
    end: float


def lab(seed: int, cut: bool, times: Times, compute: float) -> dict[str, Any]:
    """One run in the lab, with or without the partition."""
    chaos = ChaosConfig(per_node=HALVES, seconds=times.run, faults=0, seed=seed, compute=compute, meet_every=0)
    plan = [Fault(times.begin, "cut", (4, 5, 6, 7), times.end, 1, "packets lost")] if cut else []
    with chaos.cluster() as cluster, cluster.directory() as address, tempfile.TemporaryDirectory() as folder:
        job = chaos.job(Path(folder), seed, times.run)
        record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
    models = [value["parameters"] for value in record.values.values()]
    waited = stalls(record, 0.0)
    return {
        "seed": seed,
        "partition": cut,
        "loss": final_loss(models, job.width) if models else None,
        "workers_at_the_end": len(models),
        "spread_at_the_end": spread(models),
        "hangs": len(record.hung),
        "restarts": len(record.ended),
        "longest_stall_s": waited[0]["seconds"] if waited else None,
        "steps": last_steps(record.logs),
        "steps_in_the_partition": [steps_between(record, r, times.begin, times.end) for r in range(sum(HALVES))],
        "whole_again_after_s": whole_again(record),
        "cpu_use": record.cpu_use,
        "saturated": record.saturated,
    }


def spread(models: list[Tensor]) -> float | None:
    """The consensus distance of the models, relative to the norm of their mean; None if there are none."""
    if not models:
        return None
    mean = torch.stack(models).mean(0)
    return float((torch.stack(models) - mean).norm() / mean.norm() / len(models) ** 0.5)


def steps_between(record: JobRecord, rank: int, begin: float, end: float) -> int:
    times = [t - record.begin for log in record.logs if log.rank == rank for t, *_ in log.steps]
    return sum(begin <= t < end for t in times)


def whole_again(record: JobRecord) -> float | None:
    """Seconds from the end of the partition until every worker has seen all eight as members again."""
    if not record.faults or record.faults[0].until is None:
        return None
    mended, seen = record.faults[0].until, []
    for rank in range(sum(HALVES)):
        changes = [(t - record.begin, m) for log in record.logs if log.rank == rank for t, _, m in log.members]
        later = [t for t, members in changes if t >= mended and len(members) == sum(HALVES)]
        if not later:
            return None
        seen.append(min(later))
    return max(seen) - mended


def merged(seed: int, rule: str, steps: int, times: Times) -> float:
    """The final loss of eight workers that average exactly, inside halves during the partition."""
    torch.manual_seed(seed)
    start, labels = Student(256).state_dict(), teacher()
    models = [Student(256) for _ in range(sum(HALVES))]
    for model in models:
        model.load_state_dict(start)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3, fused=True) for model in models]
    data = [torch.Generator().manual_seed(1009 * seed + rank) for rank in range(len(models))]
    cut, mend = round(steps * times.begin / times.run), round(steps * times.end / times.run)
    for step in range(steps):
        apart = rule != RULES[0] and cut <= step < mend
        for model, optimizer, source in zip(models, optimizers, data, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            x = torch.randn(32, INPUTS, generator=source)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), labels(x)).backward()
            optimizer.step()
        if step == mend and rule == RULES[1]:
            state = optimizers[0].state_dict()
            for model, optimizer in zip(models[4:], optimizers[4:], strict=True):
                model.load_state_dict(models[0].state_dict())
                optimizer.load_state_dict(copy.deepcopy(state))  # else the optimizers would share their moments
        for group_ in (models[:4], models[4:]) if apart else (models,):
            average([list(model.parameters()) for model in group_])
    return final_loss([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models], 256)


def virtual(seed: int, rule: str, steps: int, times: Times) -> dict[str, Any]:
    return {"loss": merged(seed, rule, steps, times)}


@torch.no_grad()
def average(parameters: list[list[Tensor]]) -> None:
    for same in zip(*parameters, strict=True):
        mean = torch.stack(list(same)).mean(0)
        for p in same:
            p.copy_(mean)


class Rows:
    """The runs of a record, one line each in `rows.jsonl`; with no folder they are only kept."""

    def __init__(self, out: Path | None, settings: dict[str, Any]) -> None:
        self._file = None if out is None else out / "rows.jsonl"
        self._settings = settings
        self._found: dict[str, dict[str, Any]] = {}
        if self._file is None or not self._file.exists():
            return
        complete, _, rest = self._file.read_text().rpartition("\n")
        if rest:  # the program was killed while it wrote a line
            self._file.write_text(f"{complete}\n" if complete else "")
        for line in complete.splitlines():
            row = json.loads(line)
            if row.pop("settings") != settings:
                raise SystemExit(f"{self._file} has results of other settings; choose another --out, or remove it")
            self._found[row.pop("run")] = row

    def measured(self, run: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a run: the one that was kept, if it is valid, else that of `measure()`."""
        if run in self._found and not self._found[run].get("saturated"):
            print(f"{run}: measured before", flush=True)
            return self._found[run]
        row: dict[str, Any] = json.loads(json.dumps(measure()))  # as it is read from the file
        self._found[run] = row
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"run": run, **row, "settings": self._settings}) + "\n")
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a run")
    parser.add_argument("--lasts", type=float, default=30.0, help="seconds of the partition")
    parser.add_argument("--compute", type=float, default=0.4, help="seconds of a step; less saturates two cores")
    parser.add_argument("--steps", type=int, help="of a run of `merged`; default: as many as in the lab")
    args = parser.parse_args()
    times = Times(args.seconds, args.seconds / 3, args.seconds / 3 + args.lasts)
    if times.end >= times.run:
        parser.error(f"--lasts must be shorter than two thirds of --seconds, got {args.lasts:g} and {args.seconds:g}")
    before, seeds = environment(), list(map(int, args.seeds.split(",")))
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "seeds", "steps")}
    rows, runs = Rows(args.out, settings), []
    for seed in seeds:
        for cut in (False, True):
            name = f"seed {seed}, {'partition' if cut else 'calm'}"
            runs.append(rows.measured(name, partial(lab, seed, cut, times, args.compute)))
            print({k: v for k, v in runs[-1].items() if k != "steps"}, flush=True)
    torch.set_num_threads(1)
    made = [step for run in runs if not run["partition"] for step in run["steps"].values()]
    steps = args.steps or round(statistics.median(made or [args.seconds / args.compute]))
    rules: dict[str, list[float]] = {rule: [] for rule in RULES}
    for rule, losses in rules.items():
        for seed in seeds:
            name = f"seed {seed}, {rule}, {steps} virtual steps"
            losses.append(rows.measured(name, partial(virtual, seed, rule, steps, times))["loss"])
    lines = summary(runs, rules, times, steps)
    print("\n".join(lines))
    if args.out:
        saturated = sum(run["saturated"] for run in runs)
        write_record(
            args.out,
            data={"settings": {**settings, "seeds": seeds, "steps": steps}, "runs": runs, "rules": rules},
            summary="\n".join(lines),
            note=f"INVALID: the cores were saturated in {saturated} of {len(runs)} runs." if saturated else "",
            environment=before,
        )


def summary(runs: list[dict[str, Any]], rules: dict[str, list[float]], times: Times, steps: int) -> list[str]:
    """The tables and the verdict, as lines of Markdown."""
    lines = [
        "| seed | loss, calm | loss, partition | workers | longest stall, s | whole again after, s | steps of "
        f"each half in the {times.end - times.begin:.0f} s | cores busy, calm and partition |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for calm, cut in zip(runs[::2], runs[1::2], strict=True):
        halves = [statistics.fmean(cut["steps_in_the_partition"][h : h + 4]) for h in (0, 4)]
        lines.append(
            f"| {calm['seed']} | {number(calm['loss'], 4)} | {number(cut['loss'], 4)} | {cut['workers_at_the_end']} of "
            f"{sum(HALVES)} | {number(cut['longest_stall_s'], 2)} | {number(cut['whole_again_after_s'], 1, 'never')} | "
            f"{halves[0]:.0f}, {halves[1]:.0f} | {busy(calm)}, {busy(cut)} |"
        )
    lines += ["", noise_sentence([r["loss"] for r in runs[::2]], [r["loss"] for r in runs[1::2]])]
    lines += ["", f"Which state to continue with (virtual workers, {steps} steps, loss by seed):", ""]
    lines += ["| | loss | mean |", "|---|---|---|"]
    for rule, losses in rules.items():
        lines.append(f"| {rule} | {', '.join(f'{x:.4f}' for x in losses)} | {statistics.fmean(losses):.4f} |")
    return lines


def number(value: float | None, digits: int, without: str = "-") -> str:
    return without if value is None else f"{value:.{digits}f}"


def busy(run: dict[str, Any]) -> str:
    use = "-" if run["cpu_use"] is None else f"{run['cpu_use']:.0%}"
    return f"{use} (INVALID)" if run["saturated"] else use


def noise_sentence(calm: list[float | None], cut: list[float | None]) -> str:
    """Compare the mean losses with and without the partition to the spread of the runs without it."""
    without, with_ = ([x for x in losses if x is not None] for losses in (calm, cut))
    if len(without) < len(calm) or len(with_) < len(cut):
        return "There is no verdict: in some run no worker reached the end."
    difference = statistics.fmean(with_) - statistics.fmean(without)
    text = (
        f"The mean loss is {statistics.fmean(with_):.4f} with the partition and {statistics.fmean(without):.4f} without"
    )
    if len(without) < 2:
        return f"{text}; one seed shows no noise to compare the difference of {difference:+.4f} with."
    noise = max(without) - min(without)
    verdict = "within the noise" if difference <= noise else "ABOVE the noise"
    return f"{text}; the difference of {difference:+.4f} is {verdict} (calm runs spread over {noise:.4f})."


if __name__ == "__main__":
    main()
