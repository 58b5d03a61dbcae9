"""What a topology costs and how well it mixes, in one object: `analyze(topology)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.errors import InputError
from gossamer.topology.a2cid2 import Rates, laplacian, rates, slow_modes
from gossamer.topology.core import Layout, Topology
from gossamer.topology.mixing import KEPT, Mixer, Mixing
from gossamer.topology.volume import Volume, volumes


@dataclass(frozen=True)
class Analysis:
    """The figures of one topology on one layout, for a model of `model_bytes`."""

    name: str
    layout: Layout
    period: int
    model_bytes: float
    mixing: Mixing
    rates: Rates
    direct: Volume
    hierarchical: Volume
    volume_estimated: bool  # the mean over the first rounds of a very long period
    max_degree: int  # most peers a worker has over the period

    def to_dict(self) -> dict[str, Any]:
        """The fields of `gossamer topology show --json` but the rounds; `bytes_*` are of the hierarchical exchange."""
        mixing, direct, hierarchical = self.mixing, self.direct, self.hierarchical
        offsets = mixing.exact_after_by_offset
        estimated = {
            "contraction": mixing.contraction_estimated,
            "rounds_to_1e-3": mixing.rounds_estimated,
            "bytes": self.volume_estimated,
        }
        return {
            "name": self.name,
            "n": self.layout.n,
            "nodes": self.layout.nodes,
            "per_node": list(self.layout.per_node),
            "period": self.period,
            "exact_after": mixing.exact_after,
            "exact_after_by_offset": None if offsets is None else list(offsets),
            "contraction": mixing.contraction,
            "contraction_period": mixing.contraction_period,
            "rounds_to_1e-3": mixing.rounds_to_1e3,
            "model_bytes": self.model_bytes,
            "bytes_intra": hierarchical.intra,
            "bytes_inter": hierarchical.inter,
            "bytes_busiest_link": hierarchical.busiest,
            "bytes_intra_direct": direct.intra,
            "bytes_inter_direct": direct.inter,
            "bytes_busiest_link_direct": direct.busiest,
            "max_degree": self.max_degree,
            "chi1": self.rates.chi1,
            "chi2": self.rates.chi2,
            "eta": self.rates.eta,
            "alpha_tilde": self.rates.alpha_tilde,
            "estimated": [what for what, is_so in estimated.items() if is_so],
        }


def analyze(topology: Topology, *, model_bytes: float = 100e6) -> Analysis:
    """Contraction, exactness, rounds to 1e-3 of the initial consensus distance, bytes, and the asynchronous rates.

    Exact up to 512 workers. Above, rounds to 1e-3 come from random initial values; the contraction is exact for
    periods of up to 2^21 / n rounds, else estimated, as is listed in `to_dict()["estimated"]`.
    """
    if not model_bytes > 0:
        raise InputError(f"the model's size must be positive, got {model_bytes} bytes")
    n = topology.n
    edges = topology.union_edges()
    most_rounds = max(64, KEPT // n)
    direct, hierarchical = volumes(topology, model_bytes, most_rounds)
    if n == 1:
        asynchronous, modes, degree = Rates(None, None), edges, 0
    else:
        matrix = laplacian(n, edges)
        values, modes = slow_modes(matrix)
        asynchronous = rates(matrix, float(values[0]))
        degree = int(np.diff(matrix.indptr).max()) - 1
    return Analysis(
        topology.name,
        topology.layout,
        topology.period,
        model_bytes,
        Mixer(topology, modes).measure(),
        asynchronous,
        direct,
        hierarchical,
        topology.period > most_rounds,
        degree,
    )
