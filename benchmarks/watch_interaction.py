"""How long the live page takes to answer: from an input to the next painted picture, in Chromium.

The run has 64 virtual workers, 300 states and all charts. Needs chromium and the package playwright.
Run: PYTHONPATH=tests python benchmarks/watch_interaction.py --out benchmarks/records/watch-interaction
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from browser import driven
from gossamer.report.record import environment, write_record
from gossamer.report.watch.server import serve
from watch_files import append, virtual_rows, write_config

INPUTS = {
    "move the slider": "$('slider').value = (at + 37) % frames.length; $('slider').dispatchEvent(new Event('input'));",
    "sort the table": "$('workers').tHead.rows[0].cells[[2, 4, 7, 0][count % 4]].click();",
    "follow a worker": "$('workers').tBodies[0].rows[count % 64].click();",
    "step by key": "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft' }));",
    "new data": "show();",
}
MEASURE = """([code, count]) => new Promise((done) => {
  const act = new Function("count", code), began = performance.now(), { port1, port2 } = new MessageChannel();
  port1.onmessage = () => done(performance.now() - began);
  act(count);
  requestAnimationFrame(() => port2.postMessage(0));
})"""


def measure(workers: int, times: int) -> dict[str, list[float]]:
    """Return the milliseconds of each input."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_config(run, [8] * (workers // 8), 750, virtual=True)
        rows = virtual_rows(workers, 750, lambda w: {w ^ 1: 4000, (w + 8) % workers: 400})
        append(run, "metrics-00000.jsonl", *rows)
        with serve(run) as server, driven(1440, 1000) as page:
            page.goto(server.url)
            page.wait_for_function("frames.length > 250")
            found = {}
            for name, code in INPUTS.items():
                found[name] = [round(page.evaluate(MEASURE, [code, k]), 1) for k in range(times)]
            return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder of the record")
    given = parser.parse_args()
    before = environment()
    samples = measure(given.workers, given.times)
    lines = ["| input | median, ms | longest, ms |", "|---|---|---|"]
    lines += [f"| {name} | {statistics.median(ms):.1f} | {max(ms):.1f} |" for name, ms in samples.items()]
    print("\n".join(lines))
    if given.out:
        note = f"{given.workers} workers, 300 states, Chromium, {given.times} times each."
        write_record(given.out, data={"samples_ms": samples}, summary="\n".join(lines), note=note, environment=before)
