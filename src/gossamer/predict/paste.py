"""The lines of code to paste for a row of advice, with every option that its prediction assumes."""

from __future__ import annotations

from typing import Any

from gossamer.predict.choices import Choice

RATE = "lr: the learning rate that you use with all-reduce"


def lines(choice: Choice) -> list[str]:
    """Return the lines to write instead of `DDP(model)`; `model` and `lr` are the user's own names."""
    if choice.ddp:
        size = choice.plan.bucket_mb
        cap = f", bucket_cap_mb={size:g}" if size is not None else ""
        made = [f"model = torch.nn.parallel.DistributedDataParallel(model{cap})"]
        if choice.method.wire != "fp32":
            hook = f"default_hooks.{choice.method.wire}_compress_hook"
            made.insert(0, "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks")
            made.append(f"model.register_comm_hook(None, lambda state, bucket: {hook}(state, bucket))")
        return made
    return [_optimizer(choice), f"gossip = gossamer.decentralize(model, optimizer, {_arguments(choice)})"]


def advice_on_rate(choice: Choice) -> str:
    """Say which learning rate and clipping to start with, and by which records."""
    if choice.ddp:
        return "Learning rate and clipping stay as they are."
    if choice.method.optimizer == "sgd":
        return "Start with all-reduce's learning rate and search by factors of two: no record compares the rates."
    if choice.gradients == "node":
        first = "Keep all-reduce's learning rate (records quality-signal-*)"
    else:
        first = "Start with all-reduce's learning rate, and try half of it if the loss is behind (quality-signal-*)"
    return f"{first}; clip by gossip.clip_grad_norm_ at all-reduce's threshold, and warm up over some hundred steps."


def _optimizer(choice: Choice) -> str:
    kinds = {
        "gossipadam": "gossamer.GossipAdamW(model.parameters(), lr=lr)",
        "accumadam": "gossamer.AccumAdamW(model.parameters(), lr=lr)",
        "adam": "torch.optim.AdamW(model.parameters(), lr=lr)",
        "sgd": "torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)",
    }
    return f"optimizer = {kinds[choice.method.optimizer]}  # {RATE}"


def _arguments(choice: Choice) -> str:
    usual = Choice(choice.method, choice.algorithm)
    names = ("every", "staleness", "fragments")
    changed: dict[str, Any] = {k: getattr(choice, k) for k in names if getattr(choice, k) != getattr(usual, k)}
    changed |= {"average_every": choice.average_every} if choice.average_every else {}
    changed |= {"outer": "gossamer.Nesterov()"} if choice.outer else {}
    given = [f"topology={_written(choice.method.topology)}"]
    if changed:
        inner = ", ".join(f"{k}={v}" for k, v in changed.items())
        given.append(f"algorithm=gossamer.{choice.algorithm.upper()}({inner})")
    elif choice.algorithm != "awc":
        given.append(f"algorithm={_written(choice.algorithm)}")
    if choice.synchronous:
        given.append(f"gradients={_written(choice.gradients)}")
    given.append(f"wire={_written(choice.method.wire)}")
    if choice.plan.options:
        spelled = {"bucket_mb": "bucket_mib"}
        inner = ", ".join(f"{spelled.get(k, k)}={_written(v)}" for k, v in choice.plan.options.items())
        given.append(f"exchange=gossamer.Exchange({inner})")
    return ", ".join(given)


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else repr(value)
