"""The network falls into two halves for 30 seconds: what each half does, and what becomes of the model.

    python benchmarks/partition.py --out benchmarks/records/partition          # about 12 minutes

Two nodes of four workers train the task of `gossamer chaos` with `on_failure="continue"` for two minutes; after 40 s
the link between the nodes loses every packet for 30 s. The half that reaches the directory goes on as a job of four.
The other half goes on too, and joins again when the link is back: its workers take the state of a member. The same
seeds run without a fault.

Which state the job should continue with was decided by `merged`: eight workers that average exactly train as two
halves for as many steps, and then either all take the first half's state, or all take the mean of all eight.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

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
BEGIN, LASTS, SECONDS = 40.0, 30.0, 120.0
RULES = ("no partition", "the first half's state", "the mean of all")


def lab(seed: int, cut: bool) -> dict[str, Any]:
    """One run in the lab, with or without the partition."""
    chaos = ChaosConfig(per_node=HALVES, seconds=SECONDS, faults=0, seed=seed)
    plan = [Fault(BEGIN, "cut", (4, 5, 6, 7), BEGIN + LASTS, 1, "packets lost")] if cut else []
    with chaos.cluster() as cluster, cluster.directory() as address, tempfile.TemporaryDirectory() as folder:
        job = chaos.job(Path(folder), seed, SECONDS)
        record = run_job(cluster, job, train, plan, env={"GOSSAMER_DIRECTORY": address})
    models = [value["parameters"] for value in record.values.values()]
    mean = torch.stack(models).mean(0)
    waited = stalls(record, 0.0)
    return {
        "seed": seed,
        "partition": cut,
        "loss": final_loss(models, job.width),
        "workers_at_the_end": len(models),
        "spread_at_the_end": float((torch.stack(models) - mean).norm() / mean.norm() / len(models) ** 0.5),
        "hangs": len(record.hung),
        "restarts": len(record.ended),
        "longest_stall_s": waited[0]["seconds"] if waited else None,
        "steps": last_steps(record.logs),
        "steps_in_the_partition": [steps_between(record, r, BEGIN, BEGIN + LASTS) for r in range(sum(HALVES))],
        "whole_again_after_s": whole_again(record),
        "cpu_use": record.cpu_use,
        "saturated": record.saturated,
    }


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


def merged(seed: int, rule: str, steps: int) -> float:
    """The final loss of eight workers that average exactly, inside halves during a quarter of the steps."""
    torch.manual_seed(seed)
    start, labels = Student(256).state_dict(), teacher()
    models = [Student(256) for _ in range(sum(HALVES))]
    for model in models:
        model.load_state_dict(start)
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-3, fused=True) for model in models]
    data = [torch.Generator().manual_seed(1009 * seed + rank) for rank in range(len(models))]
    cut, mend = round(steps * BEGIN / SECONDS), round(steps * (BEGIN + LASTS) / SECONDS)
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
                optimizer.load_state_dict(state)
        for group_ in (models[:4], models[4:]) if apart else (models,):
            average([list(model.parameters()) for model in group_])
    return final_loss([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models], 256)


@torch.no_grad()
def average(parameters: list[list[Tensor]]) -> None:
    for same in zip(*parameters, strict=True):
        mean = torch.stack(list(same)).mean(0)
        for p in same:
            p.copy_(mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=720, help="of a run of `merged`")
    args = parser.parse_args()
    before, seeds = environment(), list(map(int, args.seeds.split(",")))
    runs = []
    for seed in seeds:
        for cut in (False, True):
            runs.append(lab(seed, cut))
            print({k: v for k, v in runs[-1].items() if k != "steps"}, flush=True)
    torch.set_num_threads(1)
    rules = {rule: [merged(seed, rule, args.steps) for seed in seeds] for rule in RULES}
    lines = [
        "| seed | loss, calm | loss, partition | workers | longest stall, s | whole again after, s | steps of "
        "each half in the 30 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for calm, cut in zip(runs[::2], runs[1::2], strict=True):
        halves = [statistics.fmean(cut["steps_in_the_partition"][h : h + 4]) for h in (0, 4)]
        again = cut["whole_again_after_s"]
        lines.append(
            f"| {calm['seed']} | {calm['loss']:.4f} | {cut['loss']:.4f} | {cut['workers_at_the_end']} of 8 | "
            f"{cut['longest_stall_s']:.2f} | {'never' if again is None else f'{again:.1f}'} | {halves[0]:.0f}, "
            f"{halves[1]:.0f} |"
        )
    lines += ["", f"Which state to continue with (virtual workers, {args.steps} steps, loss by seed):", ""]
    lines += ["| | loss | mean |", "|---|---|---|"]
    for rule, losses in rules.items():
        lines.append(f"| {rule} | {', '.join(f'{x:.4f}' for x in losses)} | {statistics.fmean(losses):.4f} |")
    print("\n".join(lines))
    if args.out:
        write_record(args.out, data={"runs": runs, "rules": rules}, summary="\n".join(lines), environment=before)


if __name__ == "__main__":
    main()
