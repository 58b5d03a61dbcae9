"""Draw a topology to a file: the ending chooses SVG, PNG or HTML."""

from __future__ import annotations

from pathlib import Path

from gossamer.errors import GossamerError, InputError
from gossamer.report.topology_scene import Panel, Scene
from gossamer.topology import Topology

MAX_PANELS = 16
MAX_WORKERS = 1024  # above, a picture is a smudge
FORMATS = (".svg", ".png", ".html")


def plot(topology: Topology, path: Path) -> str:
    """Write the picture; the ending of `path` chooses the format. Returns what was drawn, in words."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"cannot draw {str(path)!r}: the file must end in {', '.join(FORMATS)}; try -o topology.svg")
    if topology.n > MAX_WORKERS:
        raise InputError(f"a picture holds up to {MAX_WORKERS} workers, got {topology.n}; draw a smaller layout")
    scene = Scene.of(topology.layout)
    shown = min(topology.period, MAX_PANELS)
    panels = [Panel.of(topology.round(k), topology.layout, scene) for k in range(shown)]
    if shown < topology.period:
        rounds = f"the first {shown} of {topology.period} rounds"
    else:
        rounds = "one round" if shown == 1 else f"all {shown} rounds of a period"
    title = f"{topology.name}, {topology.layout}: {rounds}"
    try:
        if path.suffix.lower() == ".html":
            from gossamer.report.topology_html import draw
        else:
            from gossamer.report.topology_static import draw
        draw(topology, scene, panels, title, path)
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        raise GossamerError(f"plots need {package}, which is missing; run pip install 'gossamer[plot]'") from error
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r} ({error.strerror}); choose another file with -o") from error
    return title
