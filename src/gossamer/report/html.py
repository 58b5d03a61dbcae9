"""Self-contained web pages: style and script are part of the page, and nothing is fetched from a network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files


def page(title: str, parts: Iterable[str], more_script: str = "") -> str:
    """Return a complete HTML page with these parts as its body; `more_script` follows the script of all pages."""
    static = files("gossamer.report") / "static"
    style, script = ((static / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head><body>\n'
        + "\n".join(parts)
        + f"\n<script>\n{script}{more_script}</script></body></html>\n"
    )


def live_figure(svg: str, data: Mapping[str, object], caption: str = "", see: str = "") -> str:
    """Return an SVG with the numbers behind it, from which the page's script makes hover texts and zoom.

    Above it are its name, `caption`, and a sentence that says what to `see`.
    """
    sentence = f"<span>{html.escape(see)}</span>" if see else ""
    head = f"<figcaption>{html.escape(caption)}{sentence}</figcaption>" if caption or see else ""
    inside = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return f'<figure class="live">{head}{svg}<script type="application/json">{inside}</script></figure>'
