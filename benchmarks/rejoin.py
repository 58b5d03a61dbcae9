"""Measure how long a replacement of a killed worker takes, from the start of its process to its first step.

    python benchmarks/rejoin.py --out benchmarks/records/rejoin

Workers are ordinary processes on loopback that train a model of 25 MB (real parameters, emulated compute) with Adam and
on_failure="continue". They are killed with SIGKILL one after the other, rank 0 first, and started again with the same
command. Every repeat also measures the imports in a separate process. The result is the rest: the time from the end of
the imports to the first step, in which the replacement joins and gets parameters and moments from another worker.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORTS = "import os, torch, torch._dynamo, gossamer, gossamer.engine, gossamer.lab.emulate; os._exit(0)"


def work(folder: Path, model_mb: float, compute: float) -> None:
    """Train until this process is killed; write one line per stage and per step."""
    rank = int(os.environ["RANK"])
    with (folder / f"{rank}-{os.getpid()}.jsonl").open("ab", buffering=0) as file:

        def note(stage: str, **more: Any) -> None:
            file.write(json.dumps({"t": time.monotonic(), "stage": stage, **more}).encode() + b"\n")

        note("python")
        import torch

        note("torch")
        import torch._dynamo  # imported by the first step of any optimizer

        import gossamer
        from gossamer.lab.emulate import EmulatedModel

        decentralize = gossamer.decentralize  # imports the engine
        note("imported")
        torch.set_num_threads(1)
        model = EmulatedModel(model_mb, 8, compute)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        gossip = decentralize(model, optimizer, topology="aer", on_failure="continue", timeout=120)
        note("joined" if gossip.stats()["joined"] else "started", step=gossip.stats()["steps"])
        while True:
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = gossip.stats()
            note("step", step=stats["steps"], members=stats["members"])


def stages(folder: Path, rank: int, pid: int) -> list[dict[str, Any]]:
    path = folder / f"{rank}-{pid}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class RejoinJob:
    def __init__(self, folder: Path, workers: int, port: int, args: argparse.Namespace):
        self.folder, self.workers, self.port, self.args = folder, workers, port, args
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int) -> float:
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "GROUP_RANK": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "GOSSAMER_DIRECTORY": f"127.0.0.1:{self.port}",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--work", str(self.folder), "--model-mb", str(self.args.model_mb)]
        begin = time.monotonic()
        self.processes[rank] = subprocess.Popen([*command, "--compute", str(self.args.compute)], env=env)
        return begin

    def wait_for_step(self, rank: int, seconds: float = 120.0) -> list[dict[str, Any]]:
        """Wait for the first step of a rank's current process; return its stages."""
        process = self.processes[rank]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = stages(self.folder, rank, process.pid)
            if any(s["stage"] == "step" for s in seen):
                return seen
            if process.poll() is not None:
                raise SystemExit(f"worker {rank} ended with code {process.returncode} before its first step")
            time.sleep(0.02)
        raise SystemExit(f"worker {rank} made no step within {seconds:g} s: {seen[-1:]}")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def import_seconds() -> float:
    """The time of a process that makes the same imports and nothing else."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - begin


def measure(job: RejoinJob, rank: int) -> dict[str, Any]:
    alone = import_seconds()
    job.processes[rank].send_signal(signal.SIGKILL)
    job.processes[rank].wait()
    time.sleep(1.0)
    begin = job.start(rank)
    seen = job.wait_for_step(rank)
    first = {s["stage"]: s["t"] - begin for s in reversed(seen)}
    return {
        "worker": rank,
        "to_first_step_s": first["step"],
        "to_python_s": first["python"],
        "to_torch_s": first["torch"],
        "to_imported_s": first["imported"],
        "to_joined_s": first.get("joined"),
        "rest_s": first["step"] - first["imported"],
        "import_alone_s": alone,
        "step": next(s["step"] for s in seen if s["stage"] == "step"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model-mb", type=float, default=25.0)
    parser.add_argument("--compute", type=float, default=0.4)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.work is not None:
        work(args.work, args.model_mb, args.compute)
        return
    from gossamer.comm.tcp import HostedDirectory
    from gossamer.lab import CpuMeter
    from gossamer.report.record import environment, write_record

    machine = environment()
    samples = []
    hosted = HostedDirectory()
    with tempfile.TemporaryDirectory() as folder, CpuMeter() as cpu:
        job = RejoinJob(Path(folder), args.workers, hosted.port, args)
        try:
            for rank in range(args.workers):
                job.start(rank)
            for rank in range(args.workers):
                job.wait_for_step(rank)
            for repeat in range(args.repeats):
                samples.append(measure(job, repeat % args.workers))
                print(json.dumps({k: round(v, 3) if v else v for k, v in samples[-1].items()}), flush=True)
                time.sleep(2.0)
        finally:
            job.close()
    median = {k: statistics.median(s[k] for s in samples) for k in ("to_first_step_s", "to_imported_s", "rest_s")}
    worst = max(s["rest_s"] for s in samples)
    summary = (
        f"A replacement's first step came {median['to_first_step_s']:.2f} s after its start (median of "
        f"{len(samples)}), of which {median['to_imported_s']:.2f} s were imports; the rest took "
        f"{median['rest_s']:.2f} s (at worst {worst:.2f} s), a step of {args.compute:g} s of compute included.\n\n"
        "| worker | first step, s | imports, s | rest, s | importing alone, s |\n|---|---|---|---|---|\n"
    )
    for s in samples:
        summary += (
            f"| {s['worker']} | {s['to_first_step_s']:.2f} | {s['to_imported_s']:.2f} | {s['rest_s']:.2f} | "
            f"{s['import_alone_s']:.2f} |\n"
        )
    print(summary)
    if args.out is not None:
        note = "INVALID: the cores were saturated." if cpu.saturated else ""
        data = {"samples": samples, "median": median, "worst_rest_s": worst, "cpu_use": cpu.use}
        data |= {"workers": args.workers, "model_mb": args.model_mb, "compute": args.compute}
        write_record(args.out, data=data, summary=summary, note=note, environment=machine)


if __name__ == "__main__":
    main()
