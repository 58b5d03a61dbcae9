"""Live progress of a training run, on standard error; and TensorBoard."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.recipes.loop import Row

WINDOW = 20  # steps over which times are averaged


class Display(AbstractContextManager["Display"]):
    """A bar with loss, step time, throughput, consensus distance and waiting on a terminal; else a line for each
    evaluation; nothing if `quiet`."""

    def __init__(self, label: str, steps: int, unit: str, processes: int, *, quiet: bool = False):
        self._label, self._steps, self._unit, self._processes, self._quiet = label, steps, unit, processes, quiet
        self._rows: list[Row] = []
        self._distance = float("nan")
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Display:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._label.replace("[", "\\["), total=self._steps, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: Row) -> None:
        if "averaged" in row:
            self._distance = row["consensus_distance"]
            if not self._quiet and self._bar is None:
                values = "  ".join(f"{k} {v:.4g}" for k, v in row["averaged"].items())
                print(f"{self._label}  step {row['step']}/{self._steps}  {values}", file=sys.stderr, flush=True)
            return
        self._rows = [*self._rows[-WINDOW:], row]
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], text=self._text())

    def _text(self) -> str:
        first, last = self._rows[0], self._rows[-1]
        parts = [f"loss {last['loss']:.3f}"]
        steps, seconds = last["step"] - first["step"], last["seconds"] - first["seconds"]
        if steps and seconds > 0:
            parts.append(f"{1e3 * seconds / steps:.0f} ms/step")
            parts.append(f"{self._processes * (last['units'] - first['units']) / seconds:,.0f} {self._unit}/s")
            if last["waited"] is not None and first["waited"] is not None:
                parts.append(f"waiting {(last['waited'] - first['waited']) / seconds:.0%}")
        if self._distance == self._distance:
            parts.append(f"consensus {self._distance:.2g}")
        return "  ".join(parts)


def summary_writer() -> Any:
    """TensorBoard's class, if it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboard; pip install tensorboard, or leave it out"
        ) from None
    return SummaryWriter


def tensorboard(folder: Path) -> Callable[[Row], None]:
    """Writes every row as scalars to the run's folder."""
    writer = summary_writer()(str(folder / "tensorboard"))
    atexit.register(writer.close)  # a run that is stopped keeps its last steps

    def write(row: Row) -> None:
        for key, value in row.items():
            if isinstance(value, dict):
                for name, number in value.items():
                    writer.add_scalar(f"{key}/{name}", number, row["step"])
            elif isinstance(value, float):
                writer.add_scalar(f"train/{key}", value, row["step"])
        if "averaged" in row:
            writer.flush()

    return write


class Rows(AbstractContextManager["Rows"]):
    """A line for each run that has ended."""

    def __init__(self, total: int, *, quiet: bool):
        self._total, self._quiet, self._ended = total, quiet, 0

    def __exit__(self, *_: object) -> None:
        pass

    def done(self, config: Any, outcome: dict[str, Any], failed: dict[str, str], folder: Path) -> None:
        self._ended += 1
        if "diverged" in outcome:
            failed[str(folder)] = outcome["diverged"]
            text = "diverged"
        else:
            text = "  ".join(f"{k} {v:.4g}" for k, v in outcome.get("averaged", {}).items())
        if not self._quiet:
            rate = "" if config.lr is None else f" lr {config.lr:g}"
            line = f"[{self._ended}/{self._total}] {config.method}{rate} seed {config.seed}  {text}"
            print(line, file=sys.stderr, flush=True)
