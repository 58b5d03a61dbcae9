"""The Python blocks of the pages about Accelerate and the Hugging Face Trainer are one program each, and run."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
from hugging_face import fresh_accelerate

PAGES = Path(__file__).parents[2] / "docs" / "integrations"


def run_page(rank, page, folder):
    """Execute the blocks in `folder`, and return what they printed."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(encoding="utf-8"), re.S | re.M)
    torch.manual_seed(0)
    back, printed = os.getcwd(), io.StringIO()
    os.chdir(folder)
    try:
        with fresh_accelerate(), contextlib.redirect_stdout(printed):
            exec(compile("\n".join(blocks), page, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(back)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("page", "line", "files"),
    [
        ("accelerate.md", r"epoch 4: loss 0\.\d+", ["checkpoint/gossamer", "export/model.safetensors"]),
        ("transformers.md", r"evaluation loss \d\.\d+", ["run/checkpoint-20/gossamer", "run/checkpoint-30/gossamer"]),
    ],
)
def test_the_page_runs(pools, tmp_path, page, line, files):
    first, *_ = pools(2).run(run_page, page, str(tmp_path))
    assert re.search(line, first)
    assert all((tmp_path / file).exists() for file in files)
