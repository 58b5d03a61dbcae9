"""Benchmarks in the lab: step times of several methods on the same emulated accelerators and shaped links."""

from gossamer.lab.bench.run import SWEEP_STEPS, BenchPlan, expected, run_bench, timeline, trace_folder
from gossamer.lab.bench.setup import BUCKETS, Setup, dilated, format_links, parse_links

__all__ = [
    "BUCKETS",
    "SWEEP_STEPS",
    "BenchPlan",
    "Setup",
    "dilated",
    "expected",
    "format_links",
    "parse_links",
    "run_bench",
    "timeline",
    "trace_folder",
]
