"""A job whose workers are all taken at once, and that continues later: python examples/reclaimed.py

scancel and the end of spot machines send SIGTERM to all workers. They save a checkpoint together and exit with a code
that is not 0, so that the launcher (here `main`) starts them again. With RANK set, this program is one worker.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

import gossamer


def worker(steps: int, folder: Path, env: dict[str, str] | None = None) -> None:
    os.environ.update(env or {})
    rank = int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)  # all workers can access it
    (folder / f"leaving-{rank}").unlink(missing_ok=True)
    torch.set_num_threads(1)
    model = torch.nn.Linear(10, 1)
    optimizer = gossamer.GossipAdamW(model.parameters(), lr=1e-2)
    gossip = gossamer.decentralize(model, optimizer, on_failure="continue")
    gossip.leave_on(signal.SIGTERM, grace=60)  # seconds between SIGTERM and SIGKILL
    checkpoints = gossamer.Checkpoints(folder, keep_last=2)
    if not gossip.joined and checkpoints.latest() is not None:  # a worker that joins has a member's state
        checkpoints.load(gossip, model, optimizer)
    first = step = gossip.stats()["steps"]
    while step < steps and not gossip.leaving:
        x = torch.randn(32, 10, generator=torch.Generator().manual_seed(1 + rank + 1000 * step))
        (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step = gossip.stats()["steps"]
        (folder / f"trains-{rank}").touch()
        time.sleep(0.01)
    how = "left" if gossip.leaving else "done"
    if gossip.leaving:
        (folder / f"leaving-{rank}").touch()
        deadline = time.monotonic() + 15  # longer than a step, and less than half of the grace period
        while others := [r for r in gossip.stats()["members"] if not (folder / f"leaving-{r}").exists()]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not others:  # everybody leaves
            with gossip.averaged():
                how += f", saved step {checkpoints.save(gossip, model, optimizer)}"
            checkpoints.wait()
    print(f"worker {rank}: steps {first} to {step}, {how}", flush=True)
    gossip.close()
    sys.exit(128 + signal.SIGTERM if how != "done" else 0)  # 0 would tell the launcher that the job is done


def main(steps: int, folder: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gossamer.engine"])  # torch is imported once for all workers
    directory = gossamer.HostedDirectory(address="127.0.0.1")
    env = {"WORLD_SIZE": "3", "GOSSAMER_DIRECTORY": f"127.0.0.1:{directory.port}"}
    for taken in (True, False):
        workers = [context.Process(target=worker, args=(steps, folder, {**env, "RANK": str(r)})) for r in range(3)]
        for process in workers:
            process.start()
        while taken and len(list(folder.glob("trains-*"))) < 3:
            time.sleep(0.05)
        for process in workers if taken else []:
            process.terminate()  # SIGTERM
        print("exit codes:", *[process.join() or process.exitcode for process in workers], flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path("runs/reclaimed"))
    (worker if "RANK" in os.environ else main)(**vars(parser.parse_args()))
