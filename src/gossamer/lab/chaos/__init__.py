"""Chaos runs in the lab: a training job under a seeded sequence of faults, and a verdict."""
