"""The examples run as they are, under torchrun: the plain DDP script and its Gossamer twin, and FSDP2 inside nodes."""

import contextlib
import difflib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from workers import QUICK_NAMES

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(workers: int, script: str, *arguments: str) -> str:
    """What the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_epoch(script: str) -> tuple[float, float]:
    """Test loss and accuracy after two epochs on two workers."""
    printed = torchrun(2, script, "--epochs", "2")
    loss, accuracy = re.findall(r"test loss ([\d.]+)  accuracy ([\d.]+)", printed)[-1]
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


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def continue_fsdp2(rank, steps, folder):
    """What the example prints when it is resumed on 2 nodes of 2."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        load_example("fsdp2_inside").main(steps, 2, Path(folder), resume=True)
    return printed.getvalue()


def test_fsdp2_inside_and_gossip_between_learns_saves_and_resumes(pools, tmp_path):
    printed = torchrun(4, "fsdp2_inside.py", "--per-node", "2", "--steps", "60", "--out", str(tmp_path))
    assert printed.startswith("2 nodes of 2: steps 0 to 60, test loss ")
    loss = printed.split()[-1]
    assert float(loss) < 0.5  # ln 16 = 2.8 at the start
    resumed = pools(2, 2).run(continue_fsdp2, 60, str(tmp_path))[0]
    assert resumed == f"2 nodes of 2: steps 30 to 60, test loss {loss}\n"

    example = load_example("fsdp2_inside")
    model = example.Transformer()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    with torch.no_grad():
        plain = example.loss_of(model, example.batch(torch.Generator().manual_seed(0), size=256))
    assert abs(float(plain) - float(loss)) < 1e-5
