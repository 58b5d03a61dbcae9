"""Parsing of rates, links between nodes, and bad input that is refused before anything starts."""

import os

import pytest

from gossamer import InputError
from gossamer.cli import main
from gossamer.lab import LabCluster, LabUnavailable, format_rate, namespaces, parse_rate
from gossamer.lab.shaping import LinkRates, shape


@pytest.mark.parametrize(
    ("text", "bits"),
    [("50mbit", 50e6), ("1gbit", 1e9), ("500kbit", 500e3), ("2.5Gbit/s", 2.5e9), ("10 Mbit", 10e6), ("64000bit", 64e3)],
)
def test_rates_as_text(text, bits):
    assert parse_rate(text) == bits
    assert parse_rate(format_rate(bits)) == bits


def test_rates_as_numbers_and_none():
    assert parse_rate(5e7) == 5e7
    assert parse_rate("50000000") == 5e7
    assert parse_rate(None) is None
    assert parse_rate("none") is None
    assert format_rate(None) == "none"


@pytest.mark.parametrize(
    "rate", ["fast", "", "50mbps", "50 m", "-5mbit", "0", 0, -1, "inf", float("nan"), "1e9gbit", True]
)
def test_bad_rates_are_refused_in_one_sentence(rate):
    with pytest.raises(InputError) as caught:
        parse_rate(rate)
    assert "50mbit" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"nodes": 0},
        {"nodes": -1},
        {"nodes": 2.5},
        {"nodes": 300},
        {"nodes": 2, "per_node": 0},
        {"nodes": 2, "per_node": [1, 2, 3]},
        {"nodes": 2, "per_node": []},
        {"nodes": 2, "link": "fast"},
        {"nodes": 2, "links": {(0, 2): "1mbit"}},
        {"nodes": 2, "links": {(1, 1): "1mbit"}},
        {"nodes": 2, "links": {0: "1mbit"}},
        {"nodes": 2, "links": {(0, 1): "1mbit", (1, 0): "2mbit"}},
        {"nodes": 2, "network": "token ring"},
        {"nodes": 2, "network": "loopback", "link": "1mbit"},
    ],
)
def test_impossible_clusters_are_refused(arguments):
    with pytest.raises(InputError):
        LabCluster(**arguments)


def test_links_hold_in_both_directions():
    links = LinkRates.parse(4, "50mbit", {(3, 0): "10mbit", (1, 2): None})
    assert links.rate(0, 3) == links.rate(3, 0) == 10e6
    assert links.rate(2, 1) is None
    assert links.rate(0, 1) == 50e6
    assert links.of(0) == {3: 10e6}
    assert links.of(2) == {1: None}


def test_a_plain_link_is_one_token_bucket_and_a_free_one_nothing():
    assert shape("eth", None, {}, "dst") == []
    (line,) = shape("eth", 50e6, {}, "dst")
    assert line.startswith("qdisc add dev eth root tbf rate 50000000bit")


def test_guaranteed_rates_do_not_exceed_the_link():
    lines = shape("eth", 50e6, {1: 40e6, 2: 45e6, 3: 200e6}, "dst")
    inside = [line for line in lines if "parent 1:1 " in line]
    floors = [float(line.split(" rate ")[1].split("bit")[0]) for line in inside]
    assert len(inside) == 3  # the default and the two slow paths; the fast pair is a cable of its own
    assert sum(floors) <= 50e6
    assert any("parent 1: classid 1:13" in line and "ceil 200000000bit" in line for line in lines)


def test_pacing_describes_the_rates_for_the_transport():
    with LabCluster(2, [2, 1], link="8mbit", links={(0, 1): "1mbit"}, network="paced") as cluster:
        assert cluster.pacing == {"nodes": [0, 0, 1], "link": 8e6, "links": {"0-1": 1e6}}
        assert cluster.describe()["network"] == "paced"
        assert cluster.traffic() is None


def test_a_cluster_that_was_not_entered_is_an_error():
    with pytest.raises(InputError, match="with LabCluster"):
        LabCluster(2, network="loopback").run(print)


@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        ("sys.platform", "darwin", "need Linux"),
        ("os.geteuid", lambda: 1000, "need root"),
        ("find_tool", lambda name: None, "`ip` and `tc`"),
    ],
)
def test_the_reason_why_namespaces_are_unavailable(monkeypatch, target, value, words):
    monkeypatch.setattr(f"gossamer.lab.namespaces.{target}", value)
    assert words in namespaces.why_unavailable()
    with pytest.raises(LabUnavailable, match="paced"), LabCluster(2, link="1mbit"):
        pass


def test_leftovers_are_those_of_dead_launchers(monkeypatch, tmp_path):
    mine = f"gsm-{os.getpid()}-{namespaces.start_time(os.getpid())}-0-n0"
    reused = f"gsm-{os.getpid()}-12-0-n0"  # the same pid, another process
    for name in (mine, reused, "gsm-99999999-5-0-hub", "other-namespace", "gsm-other"):
        (tmp_path / name).touch()
    monkeypatch.setattr(namespaces, "NETNS", tmp_path)
    assert namespaces.leftovers() == sorted([reused, "gsm-99999999-5-0-hub"])


def test_probe_without_namespaces_names_its_own_option(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("gossamer.lab.namespaces.os.geteuid", lambda: 1000)
    out = tmp_path / "cluster.toml"
    assert main(["probe", "--nodes", "2", "--per-node", "1", "--link", "1mbit", "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert "--link: shaped links need root; run with sudo, or leave --link out" in error
    assert not out.exists()
