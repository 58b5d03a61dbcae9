"""One visual language: colors that can be told apart on light and dark pages, and a sentence above every picture."""

import itertools

import pytest

from gossamer.report.bench import draw_bars
from gossamer.report.chaos import draw_chaos, draw_soak
from gossamer.report.plots import draw_loss, draw_scaling, draw_timeline
from gossamer.report.plots.curves import ends_sentence, line_chart
from gossamer.report.plots.style import METHOD_COLORS, OTHER_COLOR, TOPOLOGY_SHADES, _shade, method_styles
from gossamer.trace import Span, Trace

METHODS = (
    *("ddp", "ddp:bf16", "dadam:aer", "dadam:ring", "dadam:aer:bf16", "gossipadam:aer", "gossipadam:ring"),
    *("gossipadam:complete", "gossipadam:one-peer-exponential:bf16", "accumadam:aer", "accumadam:ring", "dsgd:aer"),
    *("ad-psgd:ring", "a2cid2:ring", "decent-dp:aer", "accumadam:complete:int8"),
)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", [*METHOD_COLORS.values(), OTHER_COLOR])
@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_every_method_can_be_seen_on_light_and_dark_pages(color, page):
    assert contrast(color, page) > 2.8
    assert all(contrast(_shade(color, amount), page) > 1.8 for amount in TOPOLOGY_SHADES.values())


def test_sixteen_methods_differ_in_color_or_dash():
    styles = method_styles(METHODS)
    assert len({(s.color, s.dash) for s in styles.values()}) == len(METHODS)
    same_algorithm = [styles[m] for m in METHODS if m.startswith("gossipadam")]
    assert all(a.dash != b.dash for a, b in itertools.combinations(same_algorithm, 2))  # where shades are alike


def test_pictures_of_a_page_have_the_colors_of_the_page():
    drawn = line_chart({"ddp": [(0, 1, 0), (1, 0.5, 0)]}, title="loss", unit="step", see="Falls & falls.")
    assert "var(--ink)" in drawn
    assert "#000000" not in drawn
    assert "fill: #ffffff" not in drawn.partition("<defs")[0]
    assert "<figcaption>loss<span>Falls &amp; falls.</span></figcaption>" in drawn


@pytest.mark.parametrize(("higher", "expected"), [
    (False, "dadam:aer ends lowest, at 0.5 after 3 s; ddp at 0.6 after 9 s."),
    (True, "ddp ends highest, at 0.6 after 9 s."),
])  # fmt: skip
def test_the_sentence_about_curves_names_the_best(higher, expected):
    lines = {"ddp": [(1, 2, 0), (9, 0.6, 0)], "dadam:aer": [(1, 2, 0), (3, 0.5, 0)], "dsgd:aer": [(1, float("nan"), 0)]}
    assert ends_sentence(lines, "s", higher=higher) == expected


def test_the_sentence_about_the_consensus_distance_leaves_all_reduce_out():
    lines = {"ddp": [(1, 0.0, 0)], "dadam:aer": [(1, 0.25, 0)]}
    assert ends_sentence(lines, "step", higher=False, distance=True) == "dadam:aer ends closest together, at 0.25."
    assert ends_sentence({"ddp": [(1, 0.0, 0)]}, "step", higher=False, distance=True).startswith("All workers hold")


def bench(methods):
    results = [
        {"method": m, "step_ms": 100.0 + 10 * k, "step_ms_spread": [95.0 + 10 * k, 110.0 + 10 * k], "valid": True,
         "speedup_vs_ddp": 200 / (100 + 10 * k)}
        for k, m in enumerate(methods)
    ]  # fmt: skip
    cluster = {
        "name": "",
        "nodes": 2,
        "per_node": [2, 2],
        "link": "50mbit",
        "network": "paced",
        "gamma": 2,
        "jitter": "none",
    }
    return {"results": results, "ideal": {"mean_compute_ms": 90.0}, "cluster": cluster}


def texts(path):
    """The drawn texts of an SVG file; matplotlib writes each as a comment above its outline."""
    return [part.partition("-->")[0].strip() for part in path.read_text().split("<!--")[1:]]


def test_bars_are_named_and_said(tmp_path):
    found = texts(draw_bars(bench(METHODS), tmp_path / "bars.svg"))
    assert set(METHODS) <= set(found)
    assert "100 ms, 2.00×" in found
    assert any(t.startswith("ddp is fastest: 100 ms a step; compute alone takes 90 ms") for t in found)


def test_curves_say_who_is_first(tmp_path):
    curves = {"ddp": [(0.0, 2.0), (4.0, 1.0)], "dadam:aer": [(0.0, 2.0), (2.0, 1.0)]}
    found = texts(draw_loss(curves, tmp_path / "loss.svg", target=1.0))
    assert any(t.startswith("dadam:aer reaches the dotted loss of 1 first, after 2 s, 2 times sooner") for t in found)
    found = texts(draw_scaling({"ddp": [(4, 2.0), (8, 4.0)], "dadam:aer": [(4, 1.0), (8, 1.0)]}, tmp_path / "s.svg"))
    assert any(t.startswith("With 8 workers dadam:aer has the shortest steps: 1 s, 25% of ddp's") for t in found)


def test_timelines_say_who_waits(tmp_path):
    waits = Trace((Span("compute", 0, 0, 1), Span("wait", 0, 1, 2)), (0,), "ddp")
    works = Trace((Span("compute", 0, 0, 2), Span("exchange", 0, 0, 2)), (0,), "dadam:aer")
    found = texts(draw_timeline([waits, works], tmp_path / "t.svg"))
    assert "Red is waiting: ddp waits 50% of the time, dadam:aer 0%." in found


def test_chaos_says_the_verdict(tmp_path):
    life = {"worker": 0, "joined": False, "steps": [[0.1 * k, k, 1.0] for k in range(40)]}
    fault = {"kind": "kill", "how": "", "at": 1.0, "until": 2.0, "victim": [0]}
    data = {"lives": [life], "faults": [fault], "stalls": [], "seconds": 4.0, "calm_final_losses": [0.5, 0.6],
            "final_loss": 0.55, "passed": True, "longest_stall_s": 0.25}  # fmt: skip
    found = " ".join(texts(draw_chaos(data, tmp_path / "chaos.svg")))
    assert "Passed: 1 fault in 4 s, no healthy worker stalled for longer than 0.25 s, final loss 0.55" in found
    assert "(without faults 0.5 to 0.6)" in found
    worker = {"worker": 0, "generation": 1, "samples": [[0, 100, 10, 4], [9, 101, 10, 4]], "rss_growth_mb": 1.0,
              "descriptors_growth": 0.0, "threads_growth": 2.0, "seconds": 9.0}  # fmt: skip
    found = texts(draw_soak({"memory": {"workers": [worker]}}, tmp_path / "soak.svg"))
    assert any(t.startswith("Flat lines are right: in 9 s memory grew by at most +1.00 MB") for t in found)
    assert "worker 0 (replacement 1)" in found
