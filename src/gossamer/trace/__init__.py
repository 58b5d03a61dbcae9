"""Timelines: spans, one JSONL file per worker, Chrome trace export. Predicted and measured ones have one format."""

from gossamer.trace.analysis import diff, stragglers, summarize
from gossamer.trace.chrome import read_chrome, to_chrome, write_chrome
from gossamer.trace.log import Trace, TraceWriter, merge, read
from gossamer.trace.span import CATEGORIES, COLORS, Span

__all__ = [
    "CATEGORIES",
    "COLORS",
    "Span",
    "Trace",
    "TraceWriter",
    "diff",
    "merge",
    "read",
    "read_chrome",
    "stragglers",
    "summarize",
    "to_chrome",
    "write_chrome",
]
