"""Chaos runs in the lab: a training job under a seeded sequence of faults, and a verdict."""

from gossamer.lab.chaos.plan import KINDS, Fault, make_plan
from gossamer.lab.chaos.run import ChaosConfig, run_chaos

__all__ = ["KINDS", "ChaosConfig", "Fault", "make_plan", "run_chaos"]
