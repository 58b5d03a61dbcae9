"""The options of each task, validated. They need no torch, so that `gossamer train --help` can show them.

The docstring below a field is its help text on the command line.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from gossamer import InputError


class TaskOptions(BaseModel):
    """The options that every task has; each task adds its own. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    data: Path | None = None
    """Path of the data set. Without it the task uses its embedded data set, which needs no download."""
    batch: int = Field(32, ge=1)
    """Samples in the local batch, which is what one worker computes in one step."""
    partition: str = "iid"
    """How samples are divided among the workers: iid, or dirichlet:ALPHA (a smaller ALPHA is more skewed)."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the target's probability that is spread over all classes."""
    evaluate_on: int = Field(512, ge=1)
    """Samples that an evaluation during training uses; the final evaluation uses all samples."""


class VisionOptions(TaskOptions):
    model: str = "resnet8"
    """resnetDEPTH: 8, 14, 20, 26, 32, 38, 44, 56 (basic blocks) or 50 (bottlenecks)."""
    width: int | None = Field(None, ge=1)
    """Channels of the first stage. By default 16, or 64 for resnet50."""
    norm: Literal["batch", "group"] = "batch"
    """Batch or group normalization; group does not mix samples, which suits skewed data and tiny batches."""
    crop: int = Field(0, ge=0)
    """Pad training images by this many pixels and crop at random; 4 is usual for CIFAR-10."""
    flip: bool = False
    """Mirror half of the training images."""
    image_size: int | None = Field(None, ge=8)
    """Resize the images of a folder to this height and width."""


class TranslateOptions(TaskOptions):
    batch: int = Field(512, ge=1)
    """Tokens in the local batch on either side, padding included: rows times the longest sentence."""
    src: str = "en"
    """Language to translate from: the suffix of its files."""
    tgt: str = "de"
    """Language to translate to: the suffix of its files."""
    test: str | None = None
    """Name of the test set that the final evaluation uses. By default the first one by name."""
    model: Literal["tiny", "small", "base"] = "tiny"
    """tiny suits the embedded number words, small about 10,000 sentences; base is the paper's model."""
    norm: Literal["pre", "post"] = "pre"
    """Layer normalization before each block, or after each block as in the paper."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability; 0.1 to 0.3 suits small data sets."""
    vocabulary: int | None = Field(None, ge=1)
    """Subwords, shared by both languages. By default 4000 if the corpus allows, 320 for number words."""
    max_length: int = Field(128, ge=2)
    """Longer sentences are left out of training and cut in evaluation."""
    beams: int = Field(4, ge=1)
    """Hypotheses of the final evaluation's beam search; evaluations during training use one."""
    length_penalty: float = Field(0.6, ge=0.0)
    """Exponent of the beam search's length penalty."""
    evaluate_on: int = Field(128, ge=1)
    """Samples that an evaluation during training uses; the final evaluation uses all samples."""
    same_shape: bool = False
    """Give all workers batches of the same shape in each step, so that virtual workers can be vectorized."""


class LmOptions(TaskOptions):
    batch: int = Field(8, ge=1)
    """Windows of --context tokens in the local batch."""
    model: Literal["nano", "micro", "mini", "small"] = "nano"
    """small is GPT-2 small (124 million parameters with its vocabulary), mini is nanoGPT's small model."""
    context: int = Field(64, ge=2)
    """Tokens that the model sees at once."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """Plain bytes, or subwords learned from the training text."""
    vocabulary: int | None = Field(None, ge=1)
    """Subwords of the bpe tokenizer. By default 2000 if the text allows."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability; 0.1 to 0.3 suits small data sets."""
    evaluate_on: int = Field(128, ge=1)
    """Samples that an evaluation during training uses; the final evaluation uses all samples."""


TASK_OPTIONS: dict[str, type[TaskOptions]] = {
    "vision": VisionOptions,
    "translate": TranslateOptions,
    "lm": LmOptions,
}
TASKS = tuple(TASK_OPTIONS)


def options_type(task: str) -> type[TaskOptions]:
    """Return the class of the task's options; its fields are flags and keys in a configuration file."""
    if task not in TASK_OPTIONS:
        raise InputError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    return TASK_OPTIONS[task]
