"""Pictures, all drawn by matplotlib."""

from gossamer.report.plots.curves import draw_consensus, draw_contours, draw_loss, draw_scaling
from gossamer.report.plots.style import check_matplotlib, check_output
from gossamer.report.plots.timeline import draw_timeline
from gossamer.report.plots.topology import draw_topology

__all__ = [
    "check_matplotlib",
    "check_output",
    "draw_consensus",
    "draw_contours",
    "draw_loss",
    "draw_scaling",
    "draw_timeline",
    "draw_topology",
]
