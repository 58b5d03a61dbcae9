"""The plain DDP script and its Gossamer twin run as they are, under torchrun, and learn alike."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

from workers import QUICK_NAMES

EXAMPLES = Path(__file__).parents[2] / "examples"


def last_epoch(script: str) -> tuple[float, float]:
    """Test loss and accuracy after two epochs on two workers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loss, accuracy = re.findall(r"test loss ([\d.]+)  accuracy ([\d.]+)", done.stdout)[-1]
    return float(loss), float(accuracy)


def test_both_examples_run_under_torchrun_and_learn_alike():
    ddp_loss, ddp_accuracy = last_epoch("ddp.py")
    our_loss, our_accuracy = last_epoch("ddp_to_gossamer.py")
    assert ddp_accuracy > 0.95
    assert our_accuracy > 0.95
    assert abs(our_loss - ddp_loss) < 0.1


def test_the_examples_differ_in_few_lines():
    before, after = ((EXAMPLES / f).read_text().splitlines() for f in ("ddp.py", "ddp_to_gossamer.py"))
    changed = [line for line in difflib.ndiff(before[1:], after[1:]) if line[0] == "+" and line[2:].strip()]
    assert len(changed) <= 6, changed
