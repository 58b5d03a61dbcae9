"""Pictures of topologies: what is drawn, in which files, and what is said when that cannot be."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gossamer.cli import main
from gossamer.report.topology_plot import MAX_PANELS, plot
from gossamer.report.topology_scene import IDLE, TINTS, Panel, Scene
from gossamer.topology import Layout, Round, Topology, build

SVG = "{http://www.w3.org/2000/svg}"


def _panel(layout: Layout, round: Round) -> Panel:
    return Panel.of(round, layout, Scene.of(layout))


def test_pairs_inside_and_across_nodes() -> None:
    panel = _panel(Layout.of([2, 2]), Round.uniform(4, [(0, 1)]))
    assert (len(panel.intra), len(panel.inter), len(panel.bands)) == (1, 0, 0)
    assert panel.colors == ("white", "white", IDLE, IDLE)
    panel = _panel(Layout.of([2, 2]), Round.uniform(4, [(0, 2), (1, 3)]))
    assert (len(panel.intra), len(panel.inter), len(panel.bands)) == (0, 2, 0)


def test_a_group_of_two_nodes_is_one_color_and_one_band() -> None:
    panel = _panel(Layout.of([4, 4, 4]), Round.uniform(12, [range(8), range(8, 12)]))
    assert (len(panel.intra), len(panel.inter), len(panel.bands), len(panel.outlines)) == (18, 0, 1, 3)
    assert panel.colors == (TINTS[0],) * 8 + (TINTS[1],) * 4


def test_a_group_over_many_nodes_has_a_hub() -> None:
    panel = _panel(Layout.of([2] * 8), Round.uniform(16, [range(16)]))
    assert (len(panel.bands), len(panel.hubs)) == (8, 1)
    assert panel.hubs[0] == pytest.approx((0, 0), abs=1e-9)


def test_weighted_edges_are_drawn_once() -> None:
    weights = [(i, (i + d) % 6, 1 / 3) for i in range(6) for d in (1, -1)]
    panel = _panel(Layout.of([3, 3]), Round.weighted(6, weights))
    assert (len(panel.intra), len(panel.inter)) == (4, 2)


@pytest.mark.parametrize("per_node", [[1], [16], [4, 4, 2], [1] * 7, [8] * 8, [1, 5]])
def test_workers_are_in_their_boxes_and_apart(per_node: list[int]) -> None:
    layout = Layout.of(per_node)
    scene = Scene.of(layout)
    for worker, (x, y) in enumerate(scene.workers):
        inside = [abs(x - bx) < half and abs(y - by) < half for bx, by, half in scene.boxes]
        assert [m for m, hit in enumerate(inside) if hit] == [layout.node[worker]]
        assert max(abs(x), abs(y)) < scene.extent
    apart = [abs(complex(*a) - complex(*b)) for k, a in enumerate(scene.workers) for b in scene.workers[:k]]
    assert min(apart, default=1.0) > 0.99


@pytest.mark.parametrize(
    ("name", "layout", "panels"), [("aer", [4, 4, 4, 4], 4), ("ring", [1], 1), ("aer", [4, 4, 2], 12)]
)
def test_svg_has_a_panel_a_round(tmp_path: Path, name: str, layout: list[int], panels: int) -> None:
    path = tmp_path / "t.svg"
    plot(build(name, Layout.of(layout)), path)
    groups = [g.get("id", "") for g in ElementTree.parse(path).iter(f"{SVG}g")]
    assert len([g for g in groups if re.fullmatch(r"axes_\d+", g)]) == panels


def test_long_periods_are_cut_and_say_so(tmp_path: Path) -> None:
    rounds = [Round.uniform(4, [(k % 3, 3)]) for k in range(MAX_PANELS + 5)]
    title = plot(Topology.of_rounds("long", Layout.flat(4), rounds), tmp_path / "t.svg")
    assert title == "long, 4 workers on one node: the first 16 of 21 rounds"


def test_png(tmp_path: Path) -> None:
    plot(build("complete", Layout.of([4, 4])), tmp_path / "t.PNG")
    assert (tmp_path / "t.PNG").read_bytes().startswith(b"\x89PNG")


def test_html_needs_no_network(tmp_path: Path) -> None:
    plot(build("aer", Layout.of([2, 2])), tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert "aer, 2 nodes x 2 workers" in text
    assert not re.search(r"<(script|link)[^>]*(src|href)=", text)


def test_plot_says_what_it_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.svg"
    assert main(["topology", "plot", "ring", "--n", "4", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ring, 4 workers on one node: all 2 rounds of a period\n"
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ring", "--n", "4", "-o", "t.pdf"], "cannot draw 't.pdf'"),
        (["ring", "--n", "4", "-o", "/nowhere/t.svg"], "cannot write '/nowhere/t.svg' (No such file or directory)"),
        (["ring", "--n", "5000", "-o", "t.svg"], "up to 1024 workers, got 5000"),
        (["ring", "--n", "4"], "Missing option"),
    ],
)
def test_bad_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "plot", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("package", "ending"), [("matplotlib", "svg"), ("plotly", "html")])
def test_missing_package_names_the_extra(
    package: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["topology", "plot", "ring", "--n", "4", "-o", str(tmp_path / f"t.{ending}")]) == 2
    err = capsys.readouterr().err
    assert err == f"gossamer: error: plots need {package}, which is missing; run pip install 'gossamer[plot]'\n"
