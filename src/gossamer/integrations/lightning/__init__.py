"""Lightning: `Trainer(strategy=GossipStrategy(topology="aer"))`, and the same for Fabric.

Importing this module also registers both strategies under the name "gossamer", for `Trainer(strategy="gossamer")` and
`Fabric(strategy="gossamer")`.
"""

from __future__ import annotations

from gossamer.integrations._frameworks import require

require("lightning")  # before anything below imports it: a missing or old framework is one sentence

from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from gossamer.integrations.lightning.fabric import FabricGossipStrategy  # noqa: E402
from gossamer.integrations.lightning.trainer import GossipStrategy  # noqa: E402

__all__ = ["FabricGossipStrategy", "GossipStrategy"]

NAME = "gossamer"

for registry, strategy in ((StrategyRegistry, GossipStrategy), (STRATEGY_REGISTRY, FabricGossipStrategy)):
    registry.register(NAME, strategy, description="Gossip instead of a global all-reduce", override=True)
