"""Pictures of timelines: files of every kind, and the web page in a real browser without a network."""

import re

import pytest

from browser import needs_browser, shown
from gossamer.errors import InputError
from gossamer.report.plots import draw_timeline
from gossamer.trace import COLORS, Span, Trace


def trace(label="predicted"):
    spans = []
    for worker in range(3):
        for k in range(4):
            spans += [
                Span("compute", worker, k, k + 0.6, {"step": k}),
                Span("exchange", worker, k, k + 0.9, {"round": k, "bucket": 0}),
                Span("wait", worker, k + 0.6, k + 0.9, {"step": k, "peer": (worker + 1) % 3}),
            ]
    return Trace(tuple(spans), (0, 0, 1), label)


def test_svg_has_the_three_colors(tmp_path):
    text = draw_timeline([trace()], tmp_path / "t.svg").read_text()
    assert all(color in text for color in COLORS.values())


def test_mistakes(tmp_path):
    with pytest.raises(InputError, match=r"ends in \.html"):
        draw_timeline([trace()], tmp_path / "t.gif")
    with pytest.raises(InputError, match="nothing to draw"):
        draw_timeline([Trace((), (0,))], tmp_path / "t.svg")
    with pytest.raises(InputError, match="too many to draw"):
        draw_timeline([trace()] * 1000, tmp_path / "t.svg")


def test_page_is_self_contained(tmp_path):
    text = draw_timeline([trace(), trace("measured")], tmp_path / "t.html").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#)|<link|@import|url\((?!#)""", text)
    assert text.count("<script>") == 1  # the page's own
    assert len(text) < 200_000


@needs_browser
def test_page_draws_in_a_browser(tmp_path):
    text = shown(draw_timeline([trace(), trace("measured")], tmp_path / "t.html", title="both"), tmp_path / "profile")
    bars = re.findall(r'<g id="spans-\d-\w+"[^>]*clip-path[^>]*>\s*<path d="(.*?)"', text, flags=re.DOTALL)
    assert sum(path.lower().count("z") for path in bars) == 2 * 3 * 4 * 3  # every span is a bar, clipped by the script
    for label in ("predicted", "measured", "node 1 · worker 2", "waiting"):
        assert label in text


HOVER = """<script>
const data = JSON.parse(document.querySelector('script[type="application/json"]').textContent);
const svg = document.querySelector("figure.live svg"), toScreen = svg.getScreenCTM();
const [left, top1, right, bottom] = data.axes[1].box;
let [from, to] = data.x;
function at(time, row) {
  const y = top1 + (row - data.axes[1].y[0]) / (data.axes[1].y[1] - data.axes[1].y[0]) * (bottom - top1);
  const x = left + (time - from) / (to - from) * (right - left);
  const p = new DOMPoint(x, y).matrixTransform(toScreen);
  return { clientX: p.x, clientY: p.y, bubbles: true };
}
const read = [];
function hover(time, row) {
  svg.dispatchEvent(new MouseEvent("mousemove", at(time, row)));
  read.push(document.querySelector(".tip").hidden ? "nothing" : document.querySelector(".tip").textContent);
}
hover(1200, 2); hover(1700, 2); hover(1200, 2.4); hover(1950, 2);
svg.dispatchEvent(new MouseEvent("mousedown", at(1000, 1)));
window.dispatchEvent(new MouseEvent("mouseup", at(2000, 1)));
[from, to] = [1000, 2000];
hover(1700, 2);
document.title = read.join(" | ").replaceAll("\\n", ", ");
</script></body>"""


@needs_browser
def test_hovering_names_a_span_also_after_zooming(tmp_path):
    page = draw_timeline([trace(), trace("measured")], tmp_path / "t.html")
    page.write_text(page.read_text().replace("</body>", HOVER))
    title = re.search("<title>(.*?)</title>", shown(page, tmp_path / "profile"))
    waits = "worker 2: wait, 300 ms, step 1, peer 0"
    exchanges = "worker 2: exchange, 900 ms, round 1, bucket 0"
    assert title[1] == f"worker 2: compute, 600 ms, step 1 | {waits} | {exchanges} | nothing | {waits}"
