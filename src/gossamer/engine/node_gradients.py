"""Gradients that are averaged exactly among the workers of a node, inside the backward pass, by torch's DDP.

Note [When DDP is armed]
    DDP's reducer hangs on the gradient accumulators of the parameters, so it sees every backward pass; but it only acts
    after the forward pass of the DDP module has armed it. A private DDP has no forward pass that the user calls.
    `PrivateDDP` arms it when the first gradient of a backward pass arrives: a hook before each accumulator runs earlier
    than the reducer's hook after it. So the module has no hooks and stays what it was (deepcopy, `torch.save`,
    `torch.compile`), and a forward pass that bypasses the module (a submodule, `training_step`) makes no difference.
    The reducer finishes when every parameter has had its gradient; the next gradient then belongs to a new backward
    pass. Parameters that are still missing at the step are an error, as in DDP without `find_unused_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.comm import ProcessGroup, gathered, private_ddp, sparse_embeddings
from gossamer.engine.prepared import Prepared
from gossamer.errors import GossamerError

SAME = 1e-4  # relative difference of norms that rounding may cause, for example by clipping on different processors


class NodeGradients:
    """The gradients of one optimizer where the user has wrapped the model in DDP on the node's process group.

    The first step compares them inside the node: a call of the bare module instead of DDP would leave them different.
    """

    remedy = "call the DDP module instead of the module inside it, and change gradients in the same way on every worker"

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        group: ProcessGroup,
        no_sync: Callable[[], AbstractContextManager[None]],
    ):
        self._named, self._group, self.no_sync = named, group, no_sync
        self._compared = False

    def check(self) -> None:
        """Before a step: raise an error if the gradients are not the node's average. Collective at the first step."""
        if self._compared:
            return
        norms = [float(v) for v in gathered(self._norm(), self._group)]
        if not all(math.isfinite(n) for n in norms):
            return  # the loss diverged: look again at the next step
        self._compared = True
        if max(norms) - min(norms) > SAME * max(norms):
            raise GossamerError(
                "the gradients of this node's workers differ, although they are averaged inside the node: their norms "
                f"are {', '.join(f'{n:.6g}' for n in norms)}; {self.remedy}"
            )

    def _norm(self) -> torch.Tensor:
        device = next(iter(self._named.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for p in self._named.values():
            if p.grad is not None:
                values = p.grad.coalesce().values() if p.grad.is_sparse else p.grad.detach()
                total += torch.linalg.vector_norm(values, dtype=torch.float64).to(device) ** 2
        return total.sqrt()

    def close(self) -> None:
        """Stop averaging."""


class PrivateDDP(NodeGradients):
    """The gradients of one optimizer, averaged by a DDP object of its own. See Note [When DDP is armed]."""

    remedy = (
        "compute gradients by backward() instead of writing them, change them in the same way on every worker, or use "
        "gradients='worker'"
    )

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter], group: ProcessGroup, *, broadcast: bool):
        super().__init__(named, group, self._paused)
        self._ddp: DistributedDataParallel | None = private_ddp(model, list(named.values()), group, broadcast=broadcast)
        sparse = {m.weight for m in sparse_embeddings(model)}
        self._sparse = {name for name, p in named.items() if p in sparse}  # parameters whose gradients may be sparse
        self.passes = 0  # backward passes that were begun
        self._missing: set[str] = set()  # parameters whose gradient the reducer waits for; empty: it is not armed
        self._skip = False  # inside no_sync()
        self._local: set[str] = set()  # parameters with a gradient of this worker alone, from no_sync()
        self._nodes = {name: torch.autograd.graph.get_gradient_edge(p).node for name, p in named.items()}
        self._hooks = [node.register_prehook(partial(self._arrives, name)) for name, node in self._nodes.items()]

    def _arrives(self, name: str, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """The gradient of a parameter is about to be accumulated."""
        if name not in self._sparse and any(g is not None and g.is_sparse for g in gradients):
            raise GossamerError(
                f"parameter {name!r} got a sparse gradient, which gradients='node' averages only for the weight of an "
                "nn.Embedding or nn.EmbeddingBag with sparse=True; compute a dense one, or use gradients='worker'"
            )
        if self._skip:
            self._local.add(name)
            return
        if not self._missing:
            self._arm()
            self._missing.update(self._named)
        if name not in self._missing:
            raise GossamerError(
                f"parameter {name!r} got a second gradient before {_listed(self._missing)} got the first: averages "
                "inside the node (gradients='node', which 'auto' chooses on several nodes) need a gradient for every "
                "parameter in each backward pass; add up the losses and call backward() once, or use gradients='worker'"
            )
        self._missing.remove(name)
        self._local.discard(name)

    def _arm(self) -> None:
        assert self._ddp is not None
        self.passes += 1
        with torch.enable_grad():  # the state in which DDP expects gradients
            self._ddp._pre_forward()  # type: ignore[no-untyped-call]
            self._ddp._post_forward(None)  # type: ignore[no-untyped-call]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._refuse_missing()
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    def check(self) -> None:
        self._refuse_missing()
        if self._local:
            raise GossamerError(
                f"the last gradient of {_listed(self._local)} comes from a backward pass inside gossip.no_sync(), so "
                "it is not averaged inside the node; run the last backward pass before step() outside of the block"
            )
        super().check()

    def _refuse_missing(self) -> None:
        if self._missing:
            raise GossamerError(
                f"{_listed(self._missing)} got no gradient in the backward pass, and gradients='node', which 'auto' "
                "chooses on several nodes, averages a backward pass when every parameter has one (as DDP does without "
                "find_unused_parameters); before decentralize(), freeze parameters that are never used. If it is not "
                "always the same ones, pass DDP(model, process_group=gossamer.node_group(), find_unused_parameters="
                "True) to decentralize() and call that, or use gradients='worker'"
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self._hooks, self._nodes, self._ddp = [], {}, None


def node_gradients(
    prepared: Prepared, wrapped: nn.Module, group: ProcessGroup, *, broadcast: bool
) -> list[NodeGradients]:
    """The gradients of each optimizer, averaged among the workers of `group`. Collective among them.

    `wrapped` is the model as the user passed it: the DDP module, or the bare one. `broadcast` starts a bare model from
    the parameters of the group's first worker.
    """
    names = {p: name for name, p in prepared.model.named_parameters()}
    found: list[NodeGradients] = []
    for optimizer in prepared.optimizers:
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        named = {names[p]: p for p in trained}
        if isinstance(wrapped, DistributedDataParallel):
            found.append(NodeGradients(named, group, wrapped.no_sync))
        else:
            found.append(PrivateDDP(prepared.model, named, group, broadcast=broadcast))
    return found


def _listed(names: set[str]) -> str:
    """The first names, as `parameter 'a'` or `parameters 'a', 'b', 'c' and 4 more`."""
    some = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(map(repr, some))}{more}"
