"""Base-(k+1) graphs: the exact average in finite time for any n, with at most k peers per round.

Takezawa, Sato, Bao, Niwa, Yamada, "Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized
Learning via Finite-time Convergence" (NeurIPS 2023, arXiv 2305.11420). A schedule here is a list of rounds, each a
list of undirected edges `(i, j, w)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise, zip_longest

from gossamer.errors import InputError
from gossamer.topology.core import Layout, Round, Topology
from gossamer.topology.registry import register

Edges = list[tuple[int, int, float]]


@register("base")
def base(layout: Layout, k: int = 1) -> Topology:
    """Base-(k+1): exact average in finite time for any n, at most k peers per round (k=1: one peer).

    The k-peer hyper-hypercube when no prime factor of n exceeds k+1. Else n = p*q with q the part of n made of
    primes up to k+1: the shorter of the simple Base-(k+1) graph on n, and the hyper-hypercube on blocks of q followed
    by the simple Base-(k+1) graph on p across the blocks.
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"base(k=...) needs an integer k >= 1 (peers per round), got {k!r}; write base(k=2)")
    n = layout.n
    rounds = _base(range(n), k)
    made = [Round.weighted(n, [*edges, *((j, i, w) for i, j, w in edges)]) for edges in rounds]
    return Topology.of_rounds("base" if k == 1 else f"base(k={k})", layout, made or [Round.uniform(n, [])])


def _base(workers: Sequence[int], k: int) -> list[Edges]:
    n = len(workers)
    if factors(n, k + 1) is not None:
        return _hyper_hypercube(workers, k)
    simple = _simple(workers, k)
    smooth, rough = _split(n, k + 1)
    blocks = [workers[b * smooth : (b + 1) * smooth] for b in range(rough)]
    inside = _together([_hyper_hypercube(block, k) for block in blocks])
    across = _together([_simple([block[i] for block in blocks], k) for i in range(smooth)])
    return min(simple, inside + across, key=len)


def _hyper_hypercube(workers: Sequence[int], k: int) -> list[Edges]:
    """H_k: |workers| = n_1 ... n_L with n_l <= k+1; round l averages the groups that differ only in digit l."""
    sizes = factors(len(workers), k + 1)
    assert sizes is not None
    rounds, stride = [], 1
    for size in sizes:
        groups = [
            [workers[start + low + stride * digit] for digit in range(size)]
            for start in range(0, len(workers), stride * size)
            for low in range(stride)
        ]
        rounds.append([(i, j, 1.0 / size) for group in groups for i, j in combinations(group, 2)])
        stride *= size
    return rounds


def _simple(workers: Sequence[int], k: int) -> list[Edges]:
    """Simple Base-(k+1): n = a_1 (k+1)^p_1 + ... + a_L (k+1)^p_L, p_1 > ... > p_L, 1 <= a_l <= k.

    The workers are split into V_1, ..., V_L of those sizes and V_l into a_l parts V_la of (k+1)^p_l. First each V_l
    averages inside. Then in round l each worker of V_{l+1}, ..., V_L exchanges with one worker of every V_la, with
    weight |V_la| / N_l, N_l = |V_l| + ... + |V_L|; that moves the right amount between V_l and the rest, so that V_la
    has the global mean as its own mean and averages inside while the later rounds go on.
    """
    if factors(len(workers), k + 1) is not None:
        return _hyper_hypercube(workers, k)
    parts: list[list[Sequence[int]]] = []  # parts[l][a] = V_la
    start = 0
    for power, digit in _digits(len(workers), k + 1):
        cuts = [start + a * power for a in range(digit + 1)]
        parts.append([workers[a:b] for a, b in pairwise(cuts)])
        start = cuts[-1]
    first = _together([_hyper_hypercube([w for part in level for w in part], k) for level in parts])
    chains: list[list[Edges]] = []
    for index, level in enumerate(parts[:-1]):
        rest = [w for later in parts[index + 1 :] for part in later for w in part]
        total = len(rest) + sum(map(len, level))
        chains.append([[]] * index + [[(v, u, len(p) / total) for p in level for v, u in zip(rest, p, strict=False)]])
        chains += [[[]] * (index + 1) + _hyper_hypercube(part, k) for part in level]
    return first + _together(chains)


def _together(chains: Sequence[list[Edges]]) -> list[Edges]:
    """Merge chains of rounds on disjoint workers, which run at the same time."""
    return [[edge for edges in step for edge in edges] for step in zip_longest(*chains, fillvalue=[])]


def _digits(n: int, base: int) -> list[tuple[int, int]]:
    """Return the non-zero digits of n as (base^p, digit), largest power first."""
    power, digits = 1, []
    while n:
        n, digit = divmod(n, base)
        if digit:
            digits.append((power, digit))
        power *= base
    return digits[::-1]


def _split(n: int, largest: int) -> tuple[int, int]:
    """Split n = smooth * rough, where smooth has all prime factors up to `largest`."""
    rough = n
    for d in range(2, largest + 1):
        while rough % d == 0:
            rough //= d
    return n // rough, rough


@lru_cache(maxsize=4096)
def factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors of n that are each at most `largest`; None if a prime factor of n is larger."""
    if n == 1:
        return ()
    options = [(d, factors(n // d, largest)) for d in range(min(n, largest), 1, -1) if n % d == 0]
    return min(((d, *rest) for d, rest in options if rest is not None), key=len, default=None)
