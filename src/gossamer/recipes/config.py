"""What a training run is told: one validated object, from a TOML file and flags, written to the run's folder."""

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
    """One run. An unknown key is refused; `options` belong to the task and are checked by it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    method: str = "accumadam:aer"
    """`NAME[:TOPOLOGY[:WIRE]]`."""
    steps: Count = 200
    seed: Whole = 0
    per_node: Annotated[tuple[Count, ...], Field(min_length=1)] = (2, 2)
    """Workers on each node."""
    virtual: bool = False
    """All workers in one process."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Peak learning rate; None: the optimizer's default in `recipes.methods`."""
    schedule: Literal["constant", "cosine", "inverse-sqrt"] = "cosine"
    warmup: Whole | None = None
    """Steps of linear warm-up; None: a twentieth of all."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.98)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    accumulate: Count = 4
    """AccumAdam's s: its moments move once every s steps."""
    betas_per: Literal["accumulation", "step"] = "step"
    """AccumAdam's betas act once an accumulation (the paper), or keep their time constant in steps."""

    micro_batches: Count = 1
    """Batches whose gradients are averaged before a step."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0: no clipping."""
    amp: bool = False
    """bfloat16 in forward and backward; parameters and optimizer stay fp32."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of worker 0's parameters; 0: none."""

    ddp_bucket_mb: Annotated[float, Field(gt=0)] | None = None
    """Size of DDP's buckets in MiB; None: torch's default, which is one bucket for a small model: no overlap."""
    combine: Literal["awc", "atc"] = "awc"
    """Synchronous gossip: overlapped, or adapt then combine."""
    every: Count = 1
    staleness: Whole = 0
    average_every: Whole = 0
    exact_inside: bool = False
    """Gradients are averaged exactly inside a node (DDP), parameters gossip between nodes."""

    on_failure: Literal["raise", "continue"] = "raise"
    """A worker that dies: the end of the run, or the others go on and the launcher replaces it."""
    max_replacements: Whole = 3
    """How many workers are replaced in a run."""

    eval_every: Whole | None = None
    """Steps between evaluations; None: a fifth of all; 0: at the end only."""
    checkpoint_every: Whole = 0
    """Steps between checkpoints; 0: only when the run is interrupted. With on_failure 'continue' at evaluations too."""
    keep_last: Count = 3
    """How many of the newest checkpoints stay."""
    batched: Literal["auto", "on", "off"] = "auto"
    """Virtual workers' gradients in one vectorized pass: measured, always or never."""
    threads: Count = 1
    """Threads of a process with virtual workers: small models are fastest with one, and several runs side by side."""
    trace: bool = False
    """Record each worker's timeline."""
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.exact_inside and len(self.per_node) < 2:
            raise ValueError(
                f"exact_inside gossips between nodes and needs two or more, got per_node {list(self.per_node)}"
            )
        if self.on_failure == "continue":
            unfit = [name for name in ("virtual", "exact_inside", "ema") if getattr(self, name)]
            if unfit:
                raise ValueError(f"on_failure 'continue' does not go with {' and '.join(unfit)}; leave out either")
        return self

    @property
    def workers(self) -> int:
        return sum(self.per_node)

    @property
    def warmup_steps(self) -> int:
        return self.steps // 20 if self.warmup is None else self.warmup

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations; larger than the run when there is only the last one."""
        if self.eval_every is None:
            return max(1, self.steps // 5)
        return self.eval_every or self.steps + 1


def make_config(values: Mapping[str, Any], where: str = "the configuration") -> RunConfig:
    """Validate; the first thing that is wrong becomes one sentence."""
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
    """The values of a configuration file: `RunConfig`'s keys, and the task's in a table `[options]`."""
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
