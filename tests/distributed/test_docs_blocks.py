"""The Python blocks of the documentation run as printed, on 2 nodes of 2 real workers."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import process_group

import gossamer

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/engine.md",
    "docs/asynchronous.md",
    "docs/choosing.md",
    "docs/howto/mixed-precision.md",
    "docs/thin-links.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
BLOCKS = [(page, block) for page in PAGES for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))]


def namespace():
    """What the pages say that a block may use: a process group, a model, its optimizer, and batches."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return {
        "gossamer": gossamer,
        "torch": torch,
        "dist": dist,
        "nn": nn,
        "model": model,
        "optimizer": gossamer.GossipAdamW(model.parameters(), lr=1e-3),
        "batches": [(torch.randn(5, 8), torch.randn(5, 4)) for _ in range(12)],
    }


def run_block(rank, block, folder):
    """Execute the block in `folder`, take a step if it leaves a handle open, and return what it printed."""
    torch.manual_seed(rank)
    back, printed = os.getcwd(), io.StringIO()
    os.chdir(folder)
    try:
        whole = "init_process_group" in block  # a program of its own
        with contextlib.nullcontext() if whole else process_group(), contextlib.redirect_stdout(printed):
            names = {"__name__": "__main__"} if whole else namespace()
            exec(compile(block, "block", "exec"), names)
            gossip = names.get("gossip")
            if not whole and gossip is not None and gossip._open:
                for _ in range(2):
                    names["model"](torch.ones(3, 8)).square().mean().backward()
                    names["optimizer"].step()
                gossip.close()
    finally:
        os.chdir(back)
    return printed.getvalue()


def test_every_page_has_blocks():
    assert {page for page, _ in BLOCKS} == set(PAGES)


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(BLOCKS)])
def test_the_block_runs(page, block, pools, tmp_path):
    printed = pools(2, 2).run(run_block, block, str(tmp_path))
    assert ("print(" in block) == any(printed)
