"""The page of an advice: the ranking, the sliders over precomputed predictions, and the lines to paste."""

import html
import json

import pytest

from browser import driven, needs_playwright
from gossamer.cli import main
from gossamer.predict import what_if as grids
from gossamer.predict.advise import advise
from gossamer.predict.changes import with_bandwidth
from gossamer.predict.choices import baselines
from gossamer.predict.cluster import load
from gossamer.predict.what_if import LINKS, STEPS, rivals_of, what_if
from gossamer.report.advise_page import advice_page
from gossamer.topology import Layout


@pytest.fixture(scope="module")
def made():
    cluster = load("a40").resized(Layout.of([2, 2]))
    advice = advise(cluster, steps=20)
    return cluster, advice, what_if(cluster, advice, worth=0.1)


def test_the_grid_holds_the_predictions_of_each_cluster(made):
    cluster, advice, grid = made
    slow = LINKS.index(0.25)
    own = [m["nodes"] for m in grid["nodes"]].index(2)
    changed = with_bandwidth(cluster, 0.25)
    ddp, first, *_ = grid["times"][slow][own][grid["jitter"].index(None)]
    assert ddp == pytest.approx(min(c.predict(changed, STEPS, 0).step_time for c in baselines(changed)), rel=1e-3)
    assert first == pytest.approx(rivals_of(advice)[0].choice.predict(changed, STEPS, 0).step_time, rel=1e-3)
    assert grid["links"][slow]["gbps"] == pytest.approx(cluster.links.inter.bandwidth_gbps / 4)
    assert grid["rivals"][0]["method"] == advice.recommendation["best_gossip"]
    assert all("gossamer.decentralize(" in r["lines"][-1] for r in grid["rivals"])
    assert len(grid["form"]["saving"]) == len(grid["form"]["sigma"])


def test_slower_links_and_more_jitter_take_longer(made):
    _, _, grid = made
    own = [m["nodes"] for m in grid["nodes"]].index(2)
    by_link = [grid["times"][k][own][0][0] for k in range(len(LINKS))]
    assert by_link == sorted(by_link, reverse=True)
    calm, shaky = (grid["times"][3][own][grid["jitter"].index(s)][0] for s in (0.0, 0.4))
    assert shaky > calm


def test_one_node_has_no_links_to_change():
    cluster = load("a40").resized(Layout.of([4]))
    advice = advise(cluster, steps=20)
    grid = what_if(cluster, advice, worth=0.1)
    assert [x["factor"] for x in grid["links"]] == [1.0]
    assert [m["nodes"] for m in grid["nodes"]] == [1]


def test_the_page_is_strict_and_complete(made):
    _, advice, grid = made
    text = advice_page(advice.to_dict(), grid, "a <cluster>")
    assert "Advice for a &lt;cluster&gt;" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    inside = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(inside.replace("<\\/", "</"))["what_if"]["own_workers"] == 4


def test_every_row_says_what_its_quality_is_based_on(made):
    _, advice, grid = made
    text = advice_page(advice.to_dict(), grid, "a cluster")
    first = advice.to_dict()["table"][0]["quality"]
    assert f'<td title="{html.escape(first["evidence"])}">{first["basis"]}</td>' in text
    ranking = text.partition("<tbody>")[2].partition("</tbody>")[0]
    assert ranking.count("<td title=") == ranking.count("<tr>")


def test_a_page_needs_a_cluster(tmp_path, capsys):
    assert main(["advise", "--run", str(tmp_path), "--html", "x.html"]) == 2
    assert "name a cluster" in capsys.readouterr().err


@needs_playwright
def test_sliders_in_a_browser(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grids, "FORM_STEPS", 10)
    page_file = tmp_path / "advise.html"
    assert main(["advise", "a40", "--nodes", "2", "--per-node", "2", "--steps", "20", "--html", str(page_file)]) == 0
    assert str(page_file) in capsys.readouterr().out
    with driven(390, 800, dark=True) as page:
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        def move(name, value):
            page.locator(f'input[aria-label="{name}"]').fill(str(value))
            return page.inner_text("#said")

        assert move("link between nodes", 0).startswith("Gossip:")  # an eighth of the bandwidth
        assert "gossamer.decentralize(" in page.inner_text("#what-if-lines")
        assert move("link between nodes", 6).startswith("Keep DDP:")
        assert "DistributedDataParallel" in page.inner_text("#what-if-lines")
        before = page.inner_text("#told")
        page.locator('input[aria-label="γ: all-reduce / compute"]').fill("0")
        assert page.inner_text("#told") != before
        assert page.locator("#form rect").count() == len(grids.GAMMAS) * len(grids.OMEGAS) + 1
