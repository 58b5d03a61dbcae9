"""What all pictures share: where they are written, what colors mean, and how an SVG becomes part of a web page.

matplotlib draws every picture. A web page holds the same picture as inline SVG, so that pages and files cannot differ.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from gossamer.errors import GossamerError, InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png", ".pdf")
PICTURES_AND_PAGES = (".html", *PICTURES)
INK, QUIET = "#24292f", "#57606a"
DPI = 144  # of PNG files
PAGE_COLORS = {"#000000": "ink", INK: "ink", QUIET: "quiet", "#b0b0b0": "line", "#8c959f": "line", "#f3f5f8": "card"}
PAGE_COLORS["#0072b2"] = "blue"  # lines inside nodes, brighter on a dark page
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

# After Okabe and Ito's palette, which color-blind people can tell apart, and Tol's muted one. Every color has a
# contrast of about 3 or more to a white and to a dark page. DDP is always gray.
METHOD_COLORS = {
    "ddp": "#8a8f98",
    "dadam": "#1f7fc0",
    "accumadam": "#009e73",
    "gossipadam": "#d55e00",
    "dsgd": "#8f8f2e",
    "ad-psgd": "#cc79a7",
    "a2cid2": "#8a63d2",
    "decent-dp": "#c98a00",
    "diloco": "#957238",
    "localsgd": "#b557a6",
}
OTHER_COLOR = "#2a8c8c"
# A topology changes the shade (below 0 darker, above 0 lighter) and the dash, so that equal curves can be told apart.
TOPOLOGY_SHADES = {"aer": 0.0, "one-peer-exponential": -0.25, "exp": -0.25, "ring": 0.25, "complete": 0.4}
TOPOLOGY_DASHES = {"one-peer-exponential": 3, "exp": 3, "ring": 4, "complete": 5}
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.6), (1.3, 1.3), (6, 1.6, 1.3, 1.6), (9, 2.5), (3, 1, 1, 1, 1, 1))
WIRE_DASHES = {"bf16": 1, "fp16": 1, "int8": 2, "int4": 3}
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class MethodStyle:
    """How one method looks in every picture."""

    color: str
    dash: tuple[float, ...]  # lengths of strokes and gaps in line widths; () is a solid line
    marker: str


def method_styles(labels: Sequence[str]) -> dict[str, MethodStyle]:
    """Return the style of each label, which is a method (`NAME[:TOPOLOGY[:WIRE]]`) and may name more after a space.

    The algorithm decides the color, the topology its shade and the dash, a wire the dash. So a method looks the same in
    every picture; labels that would look the same (two learning rates of one method) get different dashes.
    """
    styles: dict[str, MethodStyle] = {}
    used: set[tuple[str, int]] = set()
    different = list(dict.fromkeys(labels))
    for label in sorted(different, key=lambda text: " " in text):  # a plain method comes first and keeps its own dash
        name, topology, wire, *_ = [*label.split(" ")[0].rstrip(",").split(":"), "", ""]
        if name == "ddp":
            topology, wire = "", topology
        color = _shade(METHOD_COLORS.get(name, OTHER_COLOR), TOPOLOGY_SHADES.get(topology.partition("(")[0], 0.0))
        dash = WIRE_DASHES.get(wire, TOPOLOGY_DASHES.get(topology.partition("(")[0], 0))
        while (color, dash) in used and len([d for c, d in used if c == color]) < len(DASHES):
            dash = (dash + 1) % len(DASHES)
        used.add((color, dash))
        styles[label] = MethodStyle(color, DASHES[dash], MARKERS[different.index(label) % len(MARKERS)])
    return {label: styles[label] for label in different}


def _shade(color: str, amount: float) -> str:
    """Mix a color with black (amount < 0) or white (amount > 0)."""
    target = 255 if amount > 0 else 0
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (target - p) * abs(amount)):02x}" for p in parts)


def check_output(path: str | Path, endings: Sequence[str] = PICTURES) -> Path:
    """Refuse a file name that cannot be drawn to, and a missing matplotlib. Call this before long work begins."""
    path = Path(path)
    if path.suffix.lower() not in endings:
        known = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise InputError(f"cannot draw to {str(path)!r}; name a file that ends in {known}")
    check_matplotlib()
    return path


def check_matplotlib() -> None:
    """Raise a GossamerError that names the remedy if matplotlib is not installed."""
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # the module is blocked in sys.modules
        found = False
    if not found:
        raise GossamerError("plots need matplotlib, which is missing; run pip install matplotlib")


def new_figure(width: float, height: float, *, arrange: bool = True) -> Figure:
    """Return an empty figure of that size in inches, which arranges its axes by itself if `arrange` is true."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", layout="constrained" if arrange else None)


def say(figure: Figure, sentence: str) -> None:
    """Write one sentence above the picture that says what to see in it."""
    width = figure.get_size_inches()[0]
    text = textwrap.fill(sentence, max(30, int(13.5 * width)))
    figure.suptitle(text, x=0.012, ha="left", fontsize=9.5, color=INK)


def tidy(*axes: Axes) -> None:
    """Remove the upper and right border and add a light grid behind the data."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)


def save(figure: Figure, path: Path) -> Path:
    """Write a picture; its folder is made if necessary. The same picture gives the same bytes."""
    from matplotlib import rc_context

    ending = path.suffix.lower()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(ending)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "gossamer"}):
            figure.savefig(path, dpi=DPI, metadata=metadata)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another file") from None
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a page or a table; its folder is made if necessary."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another file") from None
    return path


def inline_svg(figure: Figure, salt: str, titles: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the figure as an `<svg>` element for a page.

    `salt` keeps the ids of several pictures in one page apart. `titles` gives the artist with that gid (or, for a
    collection, each of its members) a text that browsers show on hover.
    """
    from matplotlib import rc_context

    stream = io.BytesIO()
    for patch in (figure.patch, *(axis.patch for axis in figure.axes)):
        patch.set_visible(False)  # the page has a background
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(stream.getvalue())
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    del root.attrib["width"], root.attrib["height"]  # the page's style decides
    for gid, texts in (titles or {}).items():
        group = root.find(f".//*[@id='{gid}']")
        assert group is not None
        for shape, text in zip(_shapes(group), texts, strict=True):
            ElementTree.SubElement(shape, f"{{{SVG}}}title").text = text
    return _follow_page(ElementTree.tostring(root, encoding="unicode"))


def _follow_page(svg: str) -> str:
    """Let text, axes and grid have the colors of the page, which is light or dark."""
    for color, name in PAGE_COLORS.items():
        svg = re.sub(rf"(fill|stroke): {color}", rf"\1: var(--{name})", svg)
    return svg


def _shapes(group: ElementTree.Element) -> list[ElementTree.Element]:
    """Return the drawn shapes in a group, in order, without the definitions they refer to."""
    defined = {id(e) for d in group.iter(f"{{{SVG}}}defs") for e in d.iter()}
    return [e for e in group.iter() if e.tag in (f"{{{SVG}}}use", f"{{{SVG}}}path") and id(e) not in defined]


def axes_box(figure: Figure, axis: Axes) -> list[float]:
    """Return left, top, right and bottom of drawn axes in the coordinates of `inline_svg`."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    box = axis.get_position()
    return [round(v, 2) for v in (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)]
