"""Advice as one self-contained page: the ranking, sliders over precomputed predictions, and the lines to paste."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gossamer.report.html import page
from gossamer.report.plots.style import method_styles, write_text

LISTED = 16  # rows of the ranking
ALIKE = 4  # of them with the same algorithm and kind of gradients


def write_advice(path: Path, advice: Mapping[str, Any], what_if: Mapping[str, Any], cluster: str) -> Path:
    """Write the page of an advice (`Advice.to_dict`) and its grid (`what_if`) for the described `cluster`."""
    return write_text(path, advice_page(advice, what_if, cluster))


def advice_page(advice: Mapping[str, Any], what_if: Mapping[str, Any], cluster: str) -> str:
    """Return the page."""
    chosen = advice["recommendation"]
    title = f"Advice for {cluster}"
    names = [r["method"] for r in advice["table"]] + [r["method"] for r in what_if["rivals"]]
    colors = {name: style.color for name, style in method_styles(["ddp", *names]).items()}
    data = {"what_if": what_if, "facts": advice["cluster"], "colors": colors}
    inside = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    script = (files("gossamer.report") / "static" / "advise.js").read_text(encoding="utf-8")
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="verdict"><b>{html.escape(_head(chosen))}</b><br>{html.escape(_sentence(chosen["why"]))}</p>',
        _pasted(chosen["lines"], "paste"),
        f'<p class="note">{html.escape(chosen["rate"])}</p>',
        *(f'<p class="note">Note: {html.escape(note)}.</p>' for note in advice["notes"]),
        "<h2>Ranking</h2>",
        f"<p>{html.escape(_ranking_sentence(advice['table']))}</p>",
        _ranking(advice["table"], colors),
        "<h2>What if</h2>",
        "<p>Move the sliders: other links, more nodes, more jitter. All predictions were made beforehand.</p>",
        '<div id="what-if"><noscript>The sliders need JavaScript.</noscript></div>',
        "<h2>Any cluster, by three numbers</h2>",
        "<p>γ is the time of an all-reduce over the compute time of a step, ω the time of an exchange over that of an "
        "all-reduce, σ the jitter of compute times. The darker, the more time gossip saves; the circle is this "
        "cluster. Times only: the number of steps to the same loss is not in it.</p>",
        '<div id="form"></div>',
        f'<script type="application/json" id="data">{inside}</script>',
    ]
    return page(title, parts, script)


def _head(chosen: Mapping[str, Any]) -> str:
    if chosen["method"].startswith("ddp"):
        return f"{chosen['verdict'][0].upper()}{chosen['verdict'][1:]}: {chosen['method']}"
    low, high = chosen["gain_range"]
    gain = f"{chosen['gain']:.0%} (between {low:.0%} and {high:.0%})"
    return f"{chosen['method']} reaches the same loss in {gain} less time than {chosen['best_allreduce']}."


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _pasted(lines: Sequence[str], name: str) -> str:
    text = html.escape("\n".join(lines))
    return (
        f'<div class="paste"><button type="button" data-copy="{name}">copy</button><pre id="{name}">{text}</pre></div>'
    )


def _ranking_sentence(table: Sequence[Mapping[str, Any]]) -> str:
    first = table[0]
    ddp = next(r for r in table if r["algorithm"] == "ddp")
    if first["algorithm"] == "ddp":
        return f"No gossip is ahead of {first['method']}: {first['step_time'] * 1e3:.3g} ms a step."
    return (
        f"Of {len(table)} choices {first['method']} leads: {first['step_time'] * 1e3:.3g} ms a step, the best "
        f"all-reduce ({ddp['method']}) {ddp['step_time'] * 1e3:.3g} ms. The score is the step time times the steps to "
        "the same loss."
    )


def _ranking(table: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> str:
    """Return the best rows, not too many alike, and every all-reduce, with a bar for the score."""
    kept: list[Mapping[str, Any]] = []
    seen: set[tuple[str, str, str]] = set()
    alike: dict[tuple[str, str], int] = {}
    for r in table:
        key, kind = (r["method"], r["algorithm"], r["gradients"]), (r["algorithm"], r["gradients"])
        alike[kind] = alike.get(kind, 0) + (key not in seen)
        ddp = r["algorithm"] == "ddp"
        if key not in seen and (ddp or (alike[kind] <= ALIKE and len(kept) < LISTED)):
            kept.append(r)
        seen.add(key)
    longest = max(r["score"] for r in kept)
    heads = ("choice", "settings", "ms a step", "waits", "× steps to the same loss", "based on", "score (ms)", "")
    rows = []
    for r in kept:
        q = r["quality"]
        steps = "1" if q["high"] == 1 else f"{q['value']:.2f} ({q['low']:.2f} to {q['high']:.2f})"
        cells = [r["method"], _options(r["options"]), f"{r['step_time'] * 1e3:.1f}", f"{r['waiting']:.0%}", steps]
        basis = f'<td title="{html.escape(q["evidence"])}">{html.escape(q["basis"])}</td>'
        style = f"width:{100 * r['score'] / longest:.1f}%;background:{colors[r['method']]}"
        bar = f'<td>{r["score"] * 1e3:.1f}</td><td class="bar"><i style="{style}"></i></td>'
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + basis + bar + "</tr>")
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="ranking">{body}</table></div>'


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in options.items())
