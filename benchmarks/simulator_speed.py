"""Seconds that the simulator takes, wall time and processor time, best of three.

Run: python benchmarks/simulator_speed.py
"""

from __future__ import annotations

import time

from gossamer.predict.predict import Abstract, predict
from gossamer.predict.presets import PRESETS
from gossamer.topology import Layout

SMALL, LARGE = Layout.of([4] * 4), Layout.of([8] * 512)
CASES = {
    "16 workers x 1000 steps, exp, abstract": (SMALL, "dadam:exp", None),
    "16 workers x 1000 steps, aer, abstract": (SMALL, "dadam:aer", None),
    "16 workers x 1000 steps, aer, cluster a40 (12 buckets)": (SMALL, "dadam:aer", "a40"),
    "16 workers x 1000 steps, exp, cluster a40 (12 buckets)": (SMALL, "dadam:exp", "a40"),
    "16 workers x 1000 steps, ring, cluster a40 (12 buckets)": (SMALL, "dadam:ring", "a40"),
    "4096 workers x 1000 steps, exp, abstract": (LARGE, "dadam:exp", None),
    "4096 workers x 1000 steps, exp, cluster a40, one bucket": (LARGE, "dadam:exp", "a40"),
}

if __name__ == "__main__":
    for what, (layout, method, preset) in CASES.items():
        if preset is None:
            setting = Abstract(layout, 2.0, 0.5, "gaussian:0.2")
        else:
            setting = PRESETS[preset].resized(layout)
            setting = setting.changed(model={"buckets": 1}) if "one bucket" in what else setting
        wall, own = [], []
        for _ in range(3):
            begin = time.perf_counter(), time.process_time()
            result = predict(method, setting, steps=1000)
            wall.append(time.perf_counter() - begin[0])
            own.append(time.process_time() - begin[1])
        print(f"{min(wall):7.2f} s ({min(own):.2f})  {what}: step time {result.step_time:.4f}", flush=True)
