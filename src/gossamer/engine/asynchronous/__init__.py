"""Asynchronous pairwise gossip: AD-PSGD and A2CiD2, for any optimizer, without a central process.

Every worker takes gradient steps at its own pace; a communication thread averages pairwise with neighbors, in the
order of an event sequence that all workers draw from one seed (gossamer.topology.events). The true state is x and,
for A2CiD2, its momentum companion x~ (Nabli, Belilovsky, Oyallon, NeurIPS 2023):
    between events   Mix(dt): d = (1 - exp(-2 eta dt)) / 2 (x~ - x);  x += d;  x~ -= d
    gradient step    Mix; the optimizer's own displacement is added to x and to x~ (any optimizer)
    exchange with j  Mix; send x; Mix; m = x_i - x_j of the two vectors that were sent;  x -= m / 2;  x~ -= alpha~ m
m is the same on both sides but for its sign, so the pair's sum is conserved. eta = 0, alpha~ = 1/2 is AD-PSGD, which
needs no x~. Times are in mean gradient times, one unit agreed by all workers at the start. dt is the time of the event
sequence: where exchanges are late, Mix waits for them (Note [Why Mix follows the events] in events.py).

Read state.py first (x, x~ and their three updates), then clock.py (the time), events.py (which event is next, and what
two workers swap in it), thread.py (the communication thread) and lane.py (the training thread, and collective calls).
One lock guards all of it; it is held for vector operations, and while the optimizer steps.
"""

from gossamer.engine.asynchronous.lane import AsyncLane

__all__ = ["AsyncLane"]
