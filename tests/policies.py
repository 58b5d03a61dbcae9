"""Arguments of `decentralize` from flat settings, for tests that sweep over them."""

from __future__ import annotations

from typing import Any

import gossamer

ALGORITHM = (
    *("every", "outer", "staleness", "average_every", "fragments"),
    *("rate", "max_staleness", "gaps", "pairing", "clock", "seed"),
)
EXCHANGE = ("bucket_mib", "in_flight", "stagger", "hierarchical", "transport")
DEADLINES = ("soft_deadline", "hard_deadline")


def policies(**flat: Any) -> dict[str, Any]:
    """Group settings by the policy that they belong to; other arguments stay as they are."""
    arguments = {k: v for k, v in flat.items() if k not in (*ALGORITHM, *EXCHANGE, *DEADLINES)}
    of_algorithm = {k: flat[k] for k in ALGORITHM if k in flat}
    if of_algorithm:
        arguments["algorithm"] = gossamer.algorithm(flat.get("algorithm", "awc"), **of_algorithm)
    if any(k in flat for k in EXCHANGE):
        arguments["exchange"] = gossamer.Exchange(**{k: flat[k] for k in EXCHANGE if k in flat})
    if any(k in flat for k in DEADLINES):
        arguments["on_failure"] = gossamer.Continue(**{k: flat[k] for k in DEADLINES if k in flat})
    return arguments
