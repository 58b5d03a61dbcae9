"""The script in docs/reliability.md under "Faults in your own tests" runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.lab import why_unavailable

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.skipif(why_unavailable() is not None, reason="needs network namespaces")
def test_the_printed_script_runs(tmp_path):
    section = PAGE.read_text(encoding="utf-8").split("### Faults in your own tests")[1]
    block = re.search(r"```python\n(.*?)```", section, re.S)
    assert block is not None
    script = tmp_path / "faults.py"
    script.write_text(block[1])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    ended = sorted(tuple(line.split()) for line in run.stdout.splitlines() if line[:1].isdigit())
    assert [(rank, how) for rank, how, _ in ended if how == "returned"] == [(str(r), "returned") for r in range(4)]
    assert ("3", "died", "None") in ended
