"""`gossamer chaos`: bad input is one sentence, and nothing is started."""

from __future__ import annotations

import pytest

from gossamer.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "30", "--faults", "20"], "20 faults do not fit into 30 seconds; pass --seconds"),
        (["--seconds", "1"], "seconds must be from 10 to a day"),
        (["--faults", "-1"], "the number of faults must be at least 0"),
        (["--nodes", "1", "--per-node", "1"], "needs at least 2 workers"),
        (["--seed", "-1"], "the seed must be at least 0"),
        (["--calm-runs", "99"], "calm runs must be 0 to 20"),
        (["--compute", "0"], "compute must be from 0.01"),
        (["--soft-deadline", "9", "--hard-deadline", "5"], "deadlines must satisfy 0 < soft < hard < timeout"),
        (["--method", "ddp"], "does not continue when a worker fails"),
        (["--method", "dadm:aer"], "unknown method"),
        (["--network", "moon"], "--network must be namespaces or loopback"),
        (["--link", "fast"], "a link rate is a number"),
        (["--plot", "x.doc"], "cannot draw to"),
        (["--per-node", "zwei"], "--per-node must be a positive number"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--help"]) == 0
    assert "gossamer chaos --nodes 4 --per-node 2" in " ".join(capsys.readouterr().out.split())
