"""Benchmarks in the lab: methods measured beside each other on emulated accelerators and shaped links."""
