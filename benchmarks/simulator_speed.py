"""Seconds the simulator takes: python benchmarks/simulator_speed.py"""

from __future__ import annotations

import time

from gossamer.runtime.predict import Abstract, predict
from gossamer.runtime.presets import PRESETS
from gossamer.topology import Layout

CASES = {
    "16 workers x 1000 steps, exp, abstract": (Layout.of([4] * 4), "dadam:exp", None),
    "16 workers x 1000 steps, aer, abstract": (Layout.of([4] * 4), "dadam:aer", None),
    "16 workers x 1000 steps, aer, cluster a40": (Layout.of([4] * 4), "dadam:aer", "a40"),
    "4096 workers x 1000 steps, exp, abstract": (Layout.of([8] * 512), "dadam:exp", None),
    "4096 workers x 1000 steps, exp, cluster a40, one bucket": (Layout.of([8] * 512), "dadam:exp", "a40"),
}

if __name__ == "__main__":
    for what, (layout, method, preset) in CASES.items():
        if preset is None:
            setting = Abstract(layout, 2.0, 0.5, "gaussian:0.2")
        else:
            setting = PRESETS[preset].resized(layout)
            setting = setting.changed(model={"buckets": 1}) if "one bucket" in what else setting
        begin = time.perf_counter()
        result = predict(method, setting, steps=1000)
        print(f"{time.perf_counter() - begin:7.2f} s  {what}: step time {result.step_time:.4f}", flush=True)
