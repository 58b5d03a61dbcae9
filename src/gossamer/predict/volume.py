"""What a node sends to other nodes, and how fast a topology averages: the same figures for `simulate` and `advise`."""

from __future__ import annotations

from functools import lru_cache

from gossamer.predict.cluster import ClusterSpec
from gossamer.predict.methods import WIRES, Method
from gossamer.predict.predict import Setting
from gossamer.predict.simulator import ExchangePolicy, Result
from gossamer.topology import Analysis, Layout, analyze, build

MOST_WORKERS = 512  # of more, the contraction takes longer than the prediction


def volume(method: Method, result: Result, setting: Setting, policy: ExchangePolicy) -> dict[str, float | None]:
    """Return the bytes that a node sends to other nodes per step, and the factor by which a step contracts distances.

    An exact average takes the place of an exchange. None: not known without a model's size, not defined, or too many
    workers.
    """
    exchanges = result.exchange_rate / policy.fragments  # of the whole model, per step
    rounds = method.topology is not None and not method.asynchronous
    averages = result.exchange_rate / policy.average_every if policy.average_every and rounds else 0.0
    shrinks = None
    if rounds and setting.layout.n <= MOST_WORKERS:
        shrinks = _analysis(method.topology or "", setting.layout).mixing.contraction ** exchanges
    if not isinstance(setting, ClusterSpec):
        sent = None
    elif method.exact:
        sent = averaged_bytes(setting, method.wire) * result.exchange_rate
    else:
        sent = gossip_bytes(setting, method, setting.layout, exchanges - averages, hierarchical=policy.hierarchical)
        sent += averaged_bytes(setting) * averages
    return {"bytes_between": sent, "contraction": shrinks}


def gossip_bytes(
    cluster: ClusterSpec, method: Method, layout: Layout, models: float, *, hierarchical: bool = True
) -> float:
    """Return the bytes of a node per step, the mean over nodes and steps, if a step exchanges so many `models`."""
    found = _analysis(method.topology or "", layout)
    each = (found.hierarchical if hierarchical else found.direct).inter * layout.n / layout.nodes
    return each * models * cluster.model.bytes * WIRES[method.wire] / 4


def averaged_bytes(cluster: ClusterSpec, wire: str = "fp32") -> float:
    """Return the bytes of a node for an average over all workers, by a ring."""
    return 2 * (1 - 1 / cluster.layout.n) * cluster.model.bytes * WIRES[wire] / 4 * (cluster.nodes > 1)


def rounds_to_1e3(topology: str, layout: Layout) -> int | None:
    """Return the rounds until differences between workers shrink to a thousandth; None: never."""
    return _analysis(topology, layout).mixing.rounds_to_1e3


@lru_cache(maxsize=4096)
def _analysis(name: str, layout: Layout) -> Analysis:
    return analyze(build(name, layout), model_bytes=1.0)
