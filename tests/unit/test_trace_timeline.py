"""Pictures of timelines: files of every kind, and the web page in a real browser without a network."""

import re

import pytest

from browser import needs_browser, shown
from gossamer.errors import InputError
from gossamer.report.timeline import draw
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
    text = draw([trace()], tmp_path / "t.svg").read_text()
    assert all(color in text for color in COLORS.values())


def test_mistakes(tmp_path):
    with pytest.raises(InputError, match=r"ends in \.html"):
        draw([trace()], tmp_path / "t.gif")
    with pytest.raises(InputError, match="nothing to draw"):
        draw([Trace((), (0,))], tmp_path / "t.svg")
    with pytest.raises(InputError, match="too many to draw"):
        draw([trace()] * 1000, tmp_path / "t.svg")


def test_page_is_self_contained(tmp_path):
    text = draw([trace(), trace("measured")], tmp_path / "t.html").read_text()
    assert not re.search(r'<(script|link)[^>]+(src|href)="http', text)
    assert len(text) > 1_000_000  # the drawing script is inside


@needs_browser
def test_page_draws_in_a_browser(tmp_path):
    text = shown(draw([trace(), trace("measured")], tmp_path / "t.html", title="both"), tmp_path / "profile")
    assert text.count('class="point"') == 2 * 3 * 4 * 3  # every span is a bar
    for label in ("predicted", "measured", "node 1 · worker 2", "waiting"):
        assert label in text
