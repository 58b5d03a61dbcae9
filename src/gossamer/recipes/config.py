"""The configuration of a training run, validated: from a TOML file and flags, written to the run's folder."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gossamer import InputError

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]


class RunConfig(BaseModel):
    """The configuration of one run. Unknown keys are refused; the task checks `options`.

    Every field is a flag of `gossamer train` and `gossamer compare`; the docstring below a field is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    task: str
    """Name of the task."""
    method: str = "gossipadam:aer"
    """The method to train by: NAME[:TOPOLOGY[:WIRE]]."""
    steps: Count = 200
    """Optimizer steps."""
    seed: Whole = 0
    """Seed of weights, data order and dropout."""
    per_node: Annotated[tuple[Count, ...], Field(min_length=1)] = (2, 2)
    """Workers on each node."""
    virtual: bool = False
    """Train all workers in one process, on a simulated clock."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Peak learning rate. By default 2e-3, for SGD 0.05."""
    schedule: Literal["constant", "cosine", "inverse-sqrt"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup: Whole | None = None
    """Steps of linear warm-up. By default a twentieth of all steps."""
    optimizer: Literal["adam", "gossipadam", "accumadam", "sgd"] | None = None
    """The optimizer, for example to give ddp the same one as gossip. By default the method's own."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.98)
    """Decay rates of the moments of Adam, GossipAdam and AccumAdam, separated by a comma."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of Adam, GossipAdam and AccumAdam."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay; decoupled (AdamW) for Adam, GossipAdam and AccumAdam."""
    accumulate: Count = 4
    """AccumAdam's s: its moments are updated once every s steps."""
    betas_per: Literal["accumulation", "step"] = "step"
    """Apply AccumAdam's betas per accumulation (the paper), or keep their time constant in steps."""
    discount: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """GossipAdam: how much further than by all-reduce the noise is discounted; 1 is all-reduce's own second moment."""
    micro_batches: Count = 1
    """Batches whose gradients are averaged before each step."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global norm of the averaged gradient, which gossip estimates. 0 disables clipping."""
    amp: bool = False
    """Use bfloat16 in forward and backward; parameters and optimizer stay in fp32."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of worker 0's parameters; 0 disables it."""

    combine: Literal["awc", "atc"] = "awc"
    """Synchronous gossip: overlap the exchange with the next step (awc), or adapt, then combine (atc)."""
    every: Count = 1
    """Steps between two exchanges. diloco and localsgd: at least 2, by default 8."""
    staleness: Whole = 0
    """Steps that a worker may take without mixing while a late exchange is in flight (awc only)."""
    average_every: Whole = 0
    """Steps between exact global averages of the parameters; 0 disables them."""
    outer: Literal["nesterov", "heavy-ball", "accelerated", "slowmo"] | None = None
    """Outer step of gossip on the drift of --every local steps; slowmo: at the averages of --average-every."""
    outer_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Learning rate of the outer step. By default 0.7, for slowmo 1; diloco takes it as well."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of the outer step. By default 0.5, for diloco 0.9."""
    fragments: Count = 1
    """Exchange one of so many parts of the model in each step, in turn."""
    exact_inside: bool | None = None
    """Average gradients exactly inside each node, gossip between nodes. By default where gradients='auto' would."""
    ddp_bucket_mb: Annotated[float, Field(gt=0)] | None = None
    """Size of DDP's buckets in MiB. By default torch's, where a small model is one bucket: no overlap."""

    on_failure: Literal["raise", "continue"] = "raise"
    """When a worker dies: end the run, or continue without the worker and replace it."""
    max_replacements: Whole = 3
    """Largest number of dead workers that are replaced in a run, with --on-failure continue."""
    soft_deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds that a step waits for a late neighbor, with --on-failure continue. By default learned per neighbor."""
    hard_deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds of silence after which a worker is dead, with --on-failure continue. By default learned, at least 5."""
    grace: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds in which a worker leaves the others in good order after SIGTERM, with --on-failure continue."""
    checkpoint_every: Whole = 0
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    save_final: bool = True
    """Save a checkpoint at the end of the run."""
    keep_last: Count = 3
    """Number of checkpoints to keep, newest first."""

    eval_every: Whole | None = None
    """Steps between evaluations; 0 evaluates at the end only. By default a fifth of all steps."""
    trace: bool = False
    """Record a timeline of each worker."""
    batched: Literal["auto", "on", "off"] = "auto"
    """Compute the gradients of virtual workers in one vectorized pass; auto tries both and keeps the faster."""
    threads: Count = 1
    """Threads of a process with virtual workers; small models are fastest with one."""
    options: dict[str, Any] = {}
    """The task's options, as a table [options]."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # On one node an outer step is left: all-reduce with an outer momentum.
        if self.exact_inside and len(self.per_node) < 2 and not (self.virtual and self.outer):
            raise ValueError(
                f"exact_inside gossips between nodes and needs two or more, got per_node {list(self.per_node)}"
            )
        if self.on_failure == "continue":
            unfit = [name for name in ("virtual", "exact_inside", "ema") if getattr(self, name)]
            if unfit:
                raise ValueError(
                    f"on_failure 'continue' cannot be combined with {' and '.join(unfit)}; leave out either"
                )
            soft, hard = self.soft_deadline, self.hard_deadline
            if soft is not None and hard is not None and soft > hard:
                raise ValueError(
                    f"soft_deadline {soft:g} (proceed without a late neighbor) must not be longer than "
                    f"hard_deadline {hard:g} (a silent worker is dead)"
                )
        return self

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(self.per_node)

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 20 if self.warmup is None else self.warmup

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations; more than the run has when only the final evaluation is wanted."""
        if self.eval_every is None:
            return max(1, self.steps // 5)
        return self.eval_every or self.steps + 1


def make_config(values: Mapping[str, Any], where: str = "the configuration") -> RunConfig:
    """Validate the values; raise `InputError` with one sentence about the first error."""
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise InputError(
                f"{where} has an unknown key {key!r}; it takes {', '.join(RunConfig.model_fields)}"
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        got = f", got {first['input']!r}" if key and not isinstance(first["input"], dict) else ""
        raise InputError(f"{key + ': ' if key else ''}{message[0].lower()}{message[1:]}{got}") from None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a configuration file: `RunConfig`'s keys, and the task's keys in a table `[options]`."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read configuration {path}: {error.strerror or error}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"configuration {path} is not valid TOML: {error}") from None
    unknown = sorted(set(values) - set(RunConfig.model_fields))
    if unknown:
        raise InputError(
            f"configuration {path} has an unknown key {unknown[0]!r}; it takes {', '.join(RunConfig.model_fields)}, "
            "and the task's own keys in a table [options]"
        )
    return values
