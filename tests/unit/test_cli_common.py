"""How a layout is written on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gossamer.cli.common import layout_from, print_json
from gossamer.errors import InputError
from gossamer.recipes.metrics import finite


@pytest.mark.parametrize(
    ("nodes", "per_node", "n", "expected"),
    [
        (4, "2", None, (2, 2, 2, 2)),
        (None, "4,4,2", None, (4, 4, 2)),
        (3, "4, 4, 2", None, (4, 4, 2)),
        (1, "5", None, (5,)),
        (None, None, 7, (7,)),
        (None, None, 1, (1,)),
        ("2", "2", None, (2, 2)),
        (None, None, "3", (3,)),
    ],
)
def test_layouts(nodes: int | str | None, per_node: str | None, n: int | str | None, expected: tuple[int, ...]) -> None:
    assert layout_from(nodes, per_node, n).per_node == expected


@pytest.mark.parametrize(
    ("nodes", "per_node", "n", "says"),
    [
        (None, None, None, "number of workers is missing"),
        (4, None, None, "--nodes 4 needs --per-node"),
        (None, "4", None, "--per-node 4 needs --nodes"),
        (2, "4,4,2", None, "lists 3 nodes but --nodes says 2"),
        (None, None, 0, "--n must be between 1 and 65536, got 0"),
        (None, None, -3, "got -3"),
        (None, None, "x", "--n must be between 1 and 65536, got 'x'"),
        ("two", "4", None, "--nodes must be between 1 and 65536, got 'two'"),
        (None, None, 10**9, "got 1000000000"),
        (0, "4", None, "--nodes must be between 1 and 65536, got 0"),
        (-1, "4,4", None, "got -1"),
        (70000, "70000", None, "got 70000"),
        (60000, "60000", None, "times --per-node must be between"),
        (4, "0", None, "got '0'"),
        (4, "-2", None, "got '-2'"),
        (None, "4,x", None, "got '4,x'"),
        (None, "4,,2", None, "got '4,,2'"),
        (4, "", None, "got ''"),
        (4, "2.5", None, "got '2.5'"),
        (None, "4,4", 8, "--n 8 puts all workers on one node and cannot be combined with --per-node"),
        (2, None, 8, "cannot be combined with --nodes"),
    ],
)
def test_bad_layouts_say_what_is_wrong(
    nodes: int | str | None, per_node: str | None, n: int | str | None, says: str
) -> None:
    with pytest.raises(InputError) as caught:
        layout_from(nodes, per_node, n)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [np.float64("inf"), 1.5], "c": np.arange(3), "d": [{"e": (1, -np.inf)}]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": [0, 1, 2], "d": [{"e": [1, None]}]}


def test_finite_keeps_plain_values() -> None:
    assert finite({"x": (True, None, "s", np.int64(3))}) == {"x": [True, None, "s", 3]}
