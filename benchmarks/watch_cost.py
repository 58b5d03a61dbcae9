"""What watching a run costs: CPU time per step while a page asks once a second, and while none does, in turn.

The workers are virtual, so that training and the page's server share one process and one interpreter lock, the
costliest case: with real workers the server is in the launcher, which does not train. The page is a process that asks
as the page's script does; it is stopped in every other block of steps. The difference of the blocks is noisy on a busy
machine, so the CPU time of the answers, and of what the workers note once a second, is also added up directly.
Run: python benchmarks/watch_cost.py --out benchmarks/records/watch-cost
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gossamer.report.record import environment, write_record

ASK = """
import json, sys, time, urllib.request
version, every, known = 0, 0.0, 0
while True:
    found = json.load(urllib.request.urlopen(f"{sys.argv[1]}api/frames?version={version}&every={every}&begin={known}"))
    version, every, known = found["version"], found["every"], found["begin"] + len(found["frames"])
    time.sleep(1)
"""


def measure(workers: int, steps: int, block: int, per_node: int) -> dict[str, Any]:
    """Train, and return the CPU milliseconds per step of the blocks with and without a page."""
    from gossamer.jobs.local import run_virtual
    from gossamer.jobs.prepare import checked_task, prepare_folder
    from gossamer.jobs.signals import stop_when_asked
    from gossamer.recipes.config import make_config
    from gossamer.recipes.strategy import Strategy
    from gossamer.report.watch import server as watching

    config = make_config(
        {
            "task": "vision",
            "steps": steps,
            "per_node": [per_node] * (workers // per_node),
            "virtual": True,
            "eval_every": 0,
            "save_final": False,
            "batched": "off",
            "options": {"batch": 16},
        }
    )
    task = checked_task(config)
    cpu: dict[bool, list[float]] = {True: [], False: []}
    answers: list[float] = []
    notes: list[float] = []
    answer, observe = watching._Handler.do_GET, Strategy.observe

    def timed_answer(handler: Any) -> None:
        answer(handler)
        answers.append(time.thread_time())  # each answer has a thread of its own

    def timed_observe(*given: Any) -> Any:
        began = time.thread_time()
        found = observe(*given)
        notes.append(time.thread_time() - began)
        return found

    watching._Handler.do_GET, Strategy.observe = timed_answer, timed_observe  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, stop_when_asked() as stop:
        clock = prepare_folder(config, Path(folder) / "run", task)
        with watching.serve(Path(folder) / "run") as server:
            page = subprocess.Popen([sys.executable, "-c", ASK, server.url])
            began, asked = time.process_time(), True

            def after(row: Any) -> None:
                nonlocal began, asked
                if row["step"] % block or "loss" not in row:
                    return
                now = time.process_time()
                cpu[asked].append(1e3 * (now - began) / block)
                asked = not asked
                os.kill(page.pid, signal.SIGCONT if asked else signal.SIGSTOP)
                began = time.process_time()

            try:
                run_virtual(config, task, Path(folder) / "run", clock, after, stop)
            finally:
                page.kill()
                page.wait()
    with_page, without = cpu[True][1:], cpu[False][1:]  # the first blocks warm up
    per_answer = statistics.median(answers)
    median_with, median_without = statistics.median(with_page), statistics.median(without)
    return {
        "workers": workers,
        "blocks": len(with_page) + len(without),
        "samples_ms": {"without": without, "with": with_page},
        "cpu_ms_per_step_without": median_without,
        "cpu_ms_per_step_with": median_with,
        "difference_percent": 100 * (median_with / median_without - 1),
        "standard_error_percent": 100 * statistics.stdev(without) / median_without / len(without) ** 0.5,
        "answers": len(answers),
        "cpu_ms_once": 1e3 * max(answers),  # the answer that draws the topology
        "cpu_ms_per_answer": 1e3 * per_answer,
        "answers_percent_of_a_core": 100 * per_answer,  # one answer a second
        "notes_percent_of_a_core": 100 * statistics.fmean(notes),  # one note a second
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--per-node", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder of the record")
    given = parser.parse_args()
    before = environment()
    found = measure(given.workers, given.steps, given.block, given.per_node)
    print(json.dumps({name: value for name, value in found.items() if name != "samples_ms"}, indent=1))
    if given.out:
        text = (
            f"{found['workers']} virtual workers, a page that asks once a second. CPU time per step: "
            f"{found['cpu_ms_per_step_without']:.2f} ms without a page, {found['cpu_ms_per_step_with']:.2f} with one "
            f"({found['difference_percent']:+.2f} %, standard error {found['standard_error_percent']:.2f} %). Added up "
            f"directly: {found['cpu_ms_per_answer']:.2f} ms for an answer, {found['answers_percent_of_a_core']:.2f} % "
            f"of a core at one answer a second, {found['cpu_ms_once']:.0f} ms once for the picture of the topology; "
            f"what the workers note costs {found['notes_percent_of_a_core']:.3f} %."
        )
        write_record(given.out, data=found, summary=text, environment=before)
