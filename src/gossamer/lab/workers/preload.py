"""Prepare multiprocessing's fork server: import what every training worker needs, once.

Only the fork server imports this module (`set_forkserver_preload`). The server computes nothing, so it has a single
thread, and forking a worker from it is safe and takes milliseconds.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

from gossamer.lab.workers.placement import WORKER_ENV

# `torch._dynamo` is imported by the first optimizer step anyway, which takes 2 s of CPU time in every worker.
MODULES = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "numpy", "gossamer.lab.chaos.worker")


def _prepare() -> None:
    os.setsid()  # Ctrl-C in the terminal is for the launcher, also while this process imports torch
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # workers import the main script: its prints belong to the launcher
    os.environ.update(WORKER_ENV)  # thread pools read these variables when their library is loaded
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # workers share these pages; a garbage collection must not write to (and so copy) them
    atexit.register(os._exit, 0)  # the server owns nothing: skip the slow and noisy teardown of torch


if sys.orig_argv[-1].startswith("from multiprocessing.forkserver import main; main("):
    _prepare()
