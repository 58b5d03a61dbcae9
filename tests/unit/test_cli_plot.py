"""Pictures of topologies: what is drawn to which files, and the errors when that cannot be done."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from browser import needs_browser, shown
from gossamer.cli import main
from gossamer.predict.methods import FAMILIES
from gossamer.report.plots import draw_topology
from gossamer.report.plots.scene import IDLE, TINTS, Panel, Scene
from gossamer.report.plots.style import METHOD_COLORS, method_styles
from gossamer.report.plots.topology import MAX_PANELS
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
def test_svg_has_one_panel_per_round(tmp_path: Path, name: str, layout: list[int], panels: int) -> None:
    path = tmp_path / "t.svg"
    draw_topology(build(name, Layout.of(layout)), path)
    groups = [g.get("id", "") for g in ElementTree.parse(path).iter(f"{SVG}g")]
    assert len([g for g in groups if re.fullmatch(r"axes_\d+", g)]) == panels


def test_title_says_how_many_rounds_of_a_long_period_are_drawn(tmp_path: Path) -> None:
    rounds = [Round.uniform(4, [(k % 3, 3)]) for k in range(MAX_PANELS + 5)]
    title = draw_topology(Topology.of_rounds("long", Layout.flat(4), rounds), tmp_path / "t.svg")
    assert title == "long, 4 workers on one node: the first 16 of 21 rounds"


def test_png(tmp_path: Path) -> None:
    draw_topology(build("complete", Layout.of([4, 4])), tmp_path / "t.PNG")
    assert (tmp_path / "t.PNG").read_bytes().startswith(b"\x89PNG")


def test_page_names_the_group_of_every_worker_in_every_round(tmp_path: Path) -> None:
    topology = build("aer", Layout.of([2, 2]))
    draw_topology(topology, tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert "aer, 2 nodes x 2 workers" in text
    titles = re.findall("<title>(worker .*?)</title>", text)
    assert len(titles) == topology.period * topology.n
    for k in range(topology.period):
        for worker in range(topology.n):
            group = topology.round(k).group_of(worker)
            what = f"group {', '.join(map(str, group))}" if len(group) > 1 else "keeps its value"
            assert f"worker {worker} on node {worker // 2}, round {k}: {what}" in titles


@needs_browser
def test_page_steps_through_rounds_in_a_browser(tmp_path: Path) -> None:
    draw_topology(build("aer", Layout.of([4, 4])), tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    clicked = """<script>document.querySelector("button[data-step='1']").click();</script></body>"""
    (tmp_path / "t.html").write_text(text.replace("</body>", clicked))
    page = shown(tmp_path / "t.html", tmp_path / "profile")
    assert re.findall(r'<figure class="(.*?)"><figcaption>(.*?)<', page)[:1] == [("shown", "round 0")]
    assert page.count('class="shown"') == 1
    assert "round 0 of" in page


def test_pages_need_no_network(tmp_path: Path) -> None:
    draw_topology(build("aer", Layout.of([2, 2])), tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#)|<link|@import|url\((?!#)""", text)
    assert len(text) < 200_000  # small: the drawing is SVG, not a script


def test_plot_says_what_it_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.svg"
    assert main(["topology", "plot", "ring", "--n", "4", "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ring, 4 workers on one node: all 2 rounds of a period\n"
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ring", "--n", "4", "-o", "t.bmp"], "cannot draw to 't.bmp'"),
        (
            ["ring", "--n", "4", "-o", "/proc/nowhere/t.svg"],
            "cannot write /proc/nowhere/t.svg: No such file",
        ),
        (["ring", "--n", "5000", "-o", "t.svg"], "up to 1024 workers, got 5000"),
        (["ring", "--n", "4"], "Missing option"),
    ],
)
def test_bad_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "plot", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "topology plot ring --n 4 -o t.svg",
        "topology plot ring --n 4 -o t.html",
        "trace plot nowhere.json -o t.html",
        "simulate --cluster a40 --html t.html",
        "simulate --cluster a40 --plot t.svg --steps 2000000000",  # before the number of steps is looked at
        "simulate --cluster a40 --contour t.svg",
        "compare vision --methods ddp --html t.html",
        "bench --plot t.svg",
        "chaos --out somewhere",
    ],
)
def test_missing_matplotlib_names_the_extra_before_any_work(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert err == "gossamer: error: plots need matplotlib, which is missing; run pip install matplotlib\n"
    assert list(tmp_path.iterdir()) == []


def test_a_method_has_one_style_everywhere() -> None:
    alone = method_styles(["accumadam:aer:bf16"])["accumadam:aer:bf16"]
    among = method_styles(["ddp", "dadam:aer", "accumadam:aer", "accumadam:aer:bf16"])
    assert (among["accumadam:aer:bf16"].color, among["accumadam:aer:bf16"].dash) == (alone.color, alone.dash)
    later = method_styles(["accumadam:aer:bf16 exact-inside", "accumadam:aer:bf16"])["accumadam:aer:bf16"]
    assert (later.color, later.dash) == (alone.color, alone.dash)
    assert among["ddp"].color == METHOD_COLORS["ddp"] == "#8a8f98"  # gray
    assert set(METHOD_COLORS) >= set(FAMILIES)


def test_labels_in_one_picture_never_look_the_same() -> None:
    labels = ["dadam:aer lr=0.1", "dadam:aer lr=0.2", "dadam:aer:bf16", "dadam:ring", "dadam:exp", "dsgd:aer", "ddp"]
    styles = method_styles(labels)
    assert len({(s.color, s.dash) for s in styles.values()}) == len(labels)
