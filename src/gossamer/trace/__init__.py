"""Spans, per-rank JSONL, Chrome/Perfetto export: one format for predicted and measured timelines."""

from gossamer.trace.span import CATEGORIES, Span

__all__ = ["CATEGORIES", "Span"]
