"""`gossamer topology list` and `show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.topology import Layout, build, entries, from_json

KEYS = """name n nodes per_node period exact_after contraction rounds_to_1e-3 bytes_intra bytes_inter
    chi1 chi2 eta alpha_tilde rounds"""


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def _run(arguments: str) -> int:
    return main(arguments.split())


def _json(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert _run(f"{arguments} --json") == 0
    return dict(json.loads(capsys.readouterr().out, parse_constant=_refuse))


def test_aer(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _json(capsys, "topology show aer --nodes 4 --per-node 4")
    assert set(KEYS.split()) <= set(shown)
    assert (shown["n"], shown["nodes"], shown["period"], shown["exact_after"]) == (16, 4, 4, 4)
    assert shown["rounds"][0]["groups"] == [[0, 1, 2, 3], [4, 5, 6, 7], list(range(8, 16))]
    matrices = [np.array(r["matrix"]) for r in shown["rounds"]]
    np.testing.assert_allclose(np.linalg.multi_dot(matrices[::-1]), np.full((16, 16), 1 / 16), atol=1e-12)


def test_ring_16(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _json(capsys, "topology show ring --n 16")
    assert shown["exact_after"] is None
    figures = [round(shown[key], 4) for key in ("chi2", "eta", "alpha_tilde")]
    assert [round(shown["chi1"], 3), *figures] == [13.137, 0.9375, 0.1425, 1.8717]


def test_base_is_exact_for_any_n(capsys: pytest.CaptureFixture[str]) -> None:
    assert _json(capsys, "topology show base --n 7")["exact_after"] is not None
    by_option = _json(capsys, "topology show base --k 2 --n 9")
    assert by_option == _json(capsys, "topology show base(k=2) --n 9")
    assert by_option["period"] < _json(capsys, "topology show base --n 9")["period"]


def test_unequal_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _json(capsys, "topology show aer --per-node 4,4,2")
    assert (shown["n"], shown["nodes"], shown["per_node"]) == (10, 3, [4, 4, 2])


def test_bytes_scale_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (_json(capsys, f"topology show aer --nodes 4 --per-node 4 --model-mb {mb}") for mb in ("10", "20"))
    assert two["bytes_inter"] == 2 * one["bytes_inter"] > 0
    assert two["bytes_intra"] == 2 * one["bytes_intra"] > 0


@pytest.mark.parametrize("name", [e.name for e in entries()])
@pytest.mark.parametrize("layout", ["--n 1", "--nodes 2 --per-node 1", "--per-node 3,1,2"])
def test_every_family_shows(name: str, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _json(capsys, f"topology show {name} {layout}")
    assert len(shown["rounds"]) == shown["period"]
    assert _run(f"topology show {name} {layout}") == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(("n", "there"), [(64, True), (65, False)])
def test_matrices_up_to_64_workers(n: int, there: bool, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _json(capsys, f"topology show complete --n {n}")
    assert ("matrix" in shown["rounds"][0]) is there


def test_title_says_how_many_rounds_of_a_long_period_are_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.cli.topology.LISTED_IN_JSON", 9 * 20)
    shown = _json(capsys, "topology show exp --n 9")
    assert (shown["period"], len(shown["rounds"]), shown["rounds_omitted"]) == (36, 20, 16)
    assert _run("topology show exp --n 9") == 0
    assert "and 20 more rounds" in capsys.readouterr().out


def test_what_is_shown_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("topology show aer --per-node 4,4,2 --json") == 0
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out)
    loaded, built = from_json(path), build("aer", Layout.of([4, 4, 2]))
    assert list(loaded.rounds) == list(built.rounds)
    assert _json(capsys, f"topology show {path}")["per_node"] == [4, 4, 2]
    assert _json(capsys, f"topology show {path} --n 10")["nodes"] == 1


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _json(capsys, "topology list")["topologies"]
    assert [t["name"] for t in listed] == [e.name for e in entries()]
    assert next(t for t in listed if t["name"] == "base")["options"] == ["k"]
    assert _run("topology list") == 0
    out = capsys.readouterr().out
    assert all(e.name in out for e in entries())


def test_list_on_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {t["name"]: t for t in _json(capsys, "topology list --nodes 4 --per-node 4")["topologies"]}
    assert listed["complete"]["exact_after"] == 1
    assert listed["aer"]["bytes_inter"] < listed["complete"]["bytes_inter"]
    assert _run("topology list --nodes 4 --per-node 4") == 0
    assert "one-peer-exponential" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("show aer", "number of workers is missing"),
        ("show aer --n 0", "got 0"),
        ("show aer --n -4", "got -4"),
        ("show aer --n 1.5", "--n must be between 1 and 65536, got '1.5'"),
        ("show rign --n 4", "did you mean 'ring'"),
        ("show ring(k=2) --n 4", "has no option 'k'"),
        ("show ring --k 2 --n 4", "has no option 'k'"),
        ("show base(k=2) --k 3 --n 4", "cannot be combined with 'base(k=2)'"),
        ("show base(k= --n 4", "cannot read topology"),
        ("show base --k 0 --n 4", "k >= 1"),
        ("show ring --n 4 --model-mb 0", "--model-mb must be a positive number"),
        ("show ring --n 4 --model-mb nan", "--model-mb must be a positive number"),
        ("show nowhere.json", "cannot read topology file 'nowhere.json'"),
        ("list --n 0", "got 0"),
    ],
)
def test_bad_input_is_one_sentence(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(f"topology {arguments}") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{not json", "is not valid JSON"),
        ('{"edges": [[0, 1], [2, 3]]}', "disconnected"),
        ('{"matrix": [[0.5, 0.5], [0.4, 0.6]]}', "sum"),
        ('{"matrix": [[1.5, -0.5], [-0.5, 1.5]]}', "negative"),
        ('{"nodes": 3}', 'needs a JSON object with "edges", "matrix" or "rounds"'),
    ],
)
def test_bad_files_are_one_sentence(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert _run(f"topology show {path}") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"gossamer: error: topology file '{path}'")
    assert says in captured.err
    assert captured.err.count("\n") == 1
