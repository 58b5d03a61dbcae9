"""The pages about frameworks show what changes from DDP: two lines, three with Ray Train; their programs have them."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


@pytest.mark.parametrize(
    ("page", "lines"), [("accelerate.md", 2), ("lightning.md", 2), ("transformers.md", 2), ("ray.md", 3)]
)
def test_few_lines_change_from_ddp(page, lines):
    text = (PAGES / page).read_text(encoding="utf-8")
    (change,) = re.findall(r"^```diff\n(.*?)^```", text, re.S | re.M)
    program = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)[0]
    added = [line[1:].strip() for line in change.splitlines() if line.startswith("+")]
    assert len(added) == lines
    assert all(line.partition("(")[0] in program for line in added)
    assert f"{'two' if lines == 2 else 'three'} lines change from ddp" in text.lower()
