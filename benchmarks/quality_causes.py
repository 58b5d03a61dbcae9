"""Why gossip of all workers is behind all-reduce: a dense reference, taken apart. Record `quality-causes`.

    python benchmarks/quality_causes.py lm --data ../shared/data/multi30k/train.en.gz

All workers' parameters are the rows of one matrix X, and a step is X <- W X - a d (`awc`), X <- W (X - a d) (`atc`), or
one row with the averaged gradient (all-reduce). Nothing is shared with the engine but the topology's matrices, so every
part can be replaced by what it should be: the second moment by the true one of all-reduce, the mixing by exact
averages, the overlap by none. Gradients are clipped by the norm of the averaged gradient, as under all-reduce.

The second moment of a worker is
    local      from the worker's own gradients by their running mean (GossipAdam where nothing is measured)
    short      its own, times the ratio of the averaged square to the own square, one ratio per parameter
    measured   the same with a memory of √workers times as many steps (GossipAdam where the signal is measured)
    shared     the mean of all workers' second moments, times that ratio
    true       that of the averaged gradients
Results are lines of --out; a study that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gossamer import Layout
from gossamer.recipes.config import make_config
from gossamer.recipes.gradients import _Loss, _stack
from gossamer.report.record import environment, write_record
from gossamer.topology import build
from quality_paired import study
from quality_runs import task_of

BETAS, EPS, WORKERS, CLIP = (0.9, 0.98), 1e-8, 16, 1.0
Setting = tuple[str, str, str]  # how it mixes, the topology, the second moment
SETTINGS: list[Setting] = [
    ("all-reduce", "", "true"),
    ("atc", "aer", "true"),
    ("atc", "aer", "measured"),
    ("atc", "aer", "short"),
    ("awc", "aer", "true"),
    ("awc", "aer", "shared"),
    ("awc", "aer", "measured"),
    ("awc", "aer", "short"),
    ("awc", "aer", "local"),
    ("awc", "complete", "true"),
]


class SecondMoment:
    """The estimate of all-reduce's second moment, for every worker."""

    def __init__(self, kind: str, rows: int, segments: Tensor):
        self.kind, self.rows, self.segments, self.steps = kind, rows, segments, 0
        self.v = self.q = torch.zeros(rows, len(segments))
        self.sums = torch.zeros(2, int(segments.max()) + 1)

    def __call__(self, g: Tensor, m: Tensor) -> Tensor:
        (beta1, beta2), self.steps = BETAS, self.steps + 1
        longer = 1 - (1 - beta2) / math.sqrt(self.rows) if self.kind == "measured" else beta2
        unbias = 1 / (1 - longer**self.steps)
        if self.kind == "true":
            self.v = torch.lerp(self.v, g.mean(0, keepdim=True).square().expand_as(self.v), 1 - beta2)
            return self.v * unbias
        self.v = torch.lerp(self.v, g.square(), 1 - longer)
        own = self.v * unbias
        if self.kind == "shared":
            own = own.mean(0, keepdim=True).expand_as(own)
        if self.kind == "local":
            self.q = torch.lerp(self.q, (m / (1 - beta1**self.steps)).square(), 1 - beta2)
            noise = (own - self.q * unbias) / (1 - (1 - beta1) / (1 + beta1))
            return (own - (1 - 1 / self.rows) * noise).clamp(own / self.rows, own)
        squares = torch.stack([g.mean(0).square(), g.square().mean(0)])
        self.sums = torch.lerp(self.sums, torch.zeros_like(self.sums).index_add_(1, self.segments, squares), 1 - beta2)
        ratio = (self.sums[0] / self.sums[1].clamp(min=1e-30)).clamp(1 / self.rows, 1)
        return own * ratio[self.segments]


def run(args: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    mixing, topology, moment = setting
    shared, rate, _ = study(args)
    layout = Layout.of([4] * (WORKERS // 4))
    config = make_config(
        {"virtual": True, "per_node": [4] * 4, "method": "gossipadam:aer", "seed": args.seed, **shared}
    )
    task = task_of(config)
    model = task.model(args.seed).train()
    sizes = [p.numel() for p in model.parameters()]
    x, loss = nn.utils.parameters_to_vector(model.parameters()).detach(), _Loss(task, model)
    shapes = {f"model.{name}": p.shape for name, p in model.named_parameters()}

    def flat_loss(values: Tensor, batch: Any) -> Tensor:
        parts = zip(shapes.items(), torch.split(values, sizes), strict=True)
        made: Tensor = functional_call(loss, {name: part.view(shape) for (name, shape), part in parts}, (batch,))
        return made.float()

    gradient = grad_and_value(flat_loss)
    streams = [task.batches(w, WORKERS, seed=args.seed) for w in range(WORKERS)]
    rows = 1 if mixing == "all-reduce" else WORKERS
    x, m = x.repeat(rows, 1), torch.zeros(rows, len(x))
    segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    second = SecondMoment(moment, rows, segments)
    plan = build(topology, layout) if topology else None
    matrices = [torch.tensor(plan.matrix(k), dtype=torch.float32) for k in range(len(plan.rounds))] if plan else []
    ratios, began = [], time.process_time()
    truth = SecondMoment("true", 1, segments)
    with sdpa_kernel(SDPBackend.MATH):
        for k in range(args.steps):
            warm = args.steps // 5
            part = (k + 1) / warm if k < warm else 0.5 * (1 + math.cos(math.pi * (k - warm) / (args.steps - warm)))
            batch = _stack([next(s) for s in streams])
            where = x.expand(WORKERS, -1) if rows == 1 else x
            g, _ = vmap(gradient, randomness="different")(where, batch)
            mean = g.mean(0, keepdim=True)
            g = (mean if rows == 1 else g) * min(1.0, CLIP / (float(mean.norm()) + 1e-6))
            m = torch.lerp(m, g, 1 - BETAS[0])
            d = second(g, m)
            if rows > 1:
                real = truth(g.mean(0, keepdim=True), m[:1])
                ratios.append(float((d.sqrt().mean(0) / (real[0].sqrt() + 1e-12)).median()))
            move = rate * part * (m / (1 - BETAS[0] ** (k + 1))) / (d.sqrt() + EPS)
            w = matrices[k % len(matrices)] if matrices else None
            if w is None:
                x = x - move
            else:
                x = w @ x - move if mixing == "awc" else w @ (x - move)
    nn.utils.vector_to_parameters(x.mean(0), model.parameters())
    found = task.evaluate(model, final=True)
    eighth = max(1, args.steps // 8)
    return {
        "setting": " ".join(part for part in setting if part),
        "seed": args.seed,
        "lr": rate,
        "steps": args.steps,
        **{k: round(v, 4) for k, v in found.items() if k in ("loss", "bleu", "accuracy")},
        "root_of_second_moment_over_true": [round(ratios[i], 3) for i in range(eighth - 1, len(ratios), eighth)],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("lm", "translate"))
    parser.add_argument("--data", help="a text, or the folder of Multi30k")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--out", type=Path, help="one line per run (default runs/quality-causes-STUDY.jsonl)")
    parser.add_argument("--record", type=Path, help="write a record of the lines in --out to this folder")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # vmap's remarks about attention
    torch.set_num_threads(1)
    machine, out = environment(), args.out or Path("runs") / f"quality-causes-{args.study}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    made = {r["setting"]: r for r in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    for setting in SETTINGS:
        name = " ".join(part for part in setting if part)
        if name not in made:
            made[name] = run(args, setting)
            with out.open("a") as lines:
                lines.write(json.dumps(made[name]) + "\n")
        print(json.dumps(made[name]), flush=True)
    if args.record:
        base = made["all-reduce true"]["loss"]
        lines = [
            f"{WORKERS} workers on nodes of 4, {args.steps} steps, seed {args.seed}, learning rate "
            f"{made['all-reduce true']['lr']:g}, gradients clipped by the norm of the averaged gradient. The last "
            "column is the median over all parameters of the root of the worker's second moment over that of the true "
            "one, after each eighth of the run: below 1, steps are too large.",
            "",
            "| mixing, topology, second moment | loss | minus all-reduce | root of the moment over the true one |",
            "|---|---|---|---|",
        ]
        for name, r in made.items():
            seen = " ".join(f"{v:.2f}" for v in r["root_of_second_moment_over_true"])
            lines.append(f"| {name} | {r['loss']:.3f} | {r['loss'] - base:+.3f} | {seen} |")
        write_record(args.record, data={"runs": list(made.values())}, summary="\n".join(lines), environment=machine)


if __name__ == "__main__":
    main()
