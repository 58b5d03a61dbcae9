"""What the tests of Accelerate and of the Hugging Face Trainer share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in the process: forget what other tests left, and at the end the process group too."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()  # a DDP model that outlives its process group may hang
        if dist.is_initialized():
            dist.destroy_process_group()
