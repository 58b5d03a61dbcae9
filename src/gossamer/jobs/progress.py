"""Live progress of training runs on standard error, and TensorBoard files."""

from __future__ import annotations

import atexit
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from gossamer.errors import InputError
from gossamer.recipes.config import RunConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = Mapping[str, Any]
Watch = Callable[[Row], None]
Outcome = dict[str, Any]
"""What came of a run, see `gossamer.recipes.loop.Progress.outcome`; or {"diverged": why}."""
WINDOW = 20  # steps over which times are averaged
POLL = 0.2  # seconds between looks at a worker's file


class Display(AbstractContextManager["Display"]):
    """Show the rows of one run: a progress bar on a terminal, else one line per evaluation, nothing if `quiet`.

    The bar shows the loss, the step time, the throughput, the share of time spent waiting and the consensus distance.
    `also` receives every row as well.
    """

    def __init__(self, config: RunConfig, unit: str, *, label: str = "", also: Watch | None = None, quiet: bool):
        self._label, self._steps, self._unit = label or config.method, config.steps, unit
        self._processes = 1 if config.virtual else config.workers
        self._also, self._quiet = also, quiet
        self._rows: list[Row] = []
        self._distance: float | None = None
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Display:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console

            columns = (
                TextColumn("{task.description}"),
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._label.replace("[", "\\["), total=self._steps, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: Row) -> None:
        if self._also is not None:
            self._also(row)
        if "averaged" in row:
            self._distance = row["consensus_distance"]
            if not self._quiet and self._bar is None:
                print(f"{self._label}  step {row['step']}/{self._steps}  {values(row)}", file=sys.stderr, flush=True)
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
        if self._distance is not None:
            parts.append(f"consensus {self._distance:.2g}")
        return "  ".join(parts)


class Finished:
    """Print one line per finished run."""

    def __init__(self, total: int, *, quiet: bool):
        self._total, self._quiet, self._count = total, quiet, 0
        self._start = time.monotonic()

    def __call__(self, config: RunConfig, outcome: Row) -> None:
        self._count += 1
        if self._quiet:
            return
        rate = "" if config.lr is None else f" lr {config.lr:g}"
        text = "diverged" if "diverged" in outcome else values(outcome)
        line = f"[{self._count}/{self._total}] {config.method}{rate} seed {config.seed}  {text}{self._left()}"
        print(line, file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Return the time that the remaining runs will take if they take as long as the finished ones."""
        seconds = (time.monotonic() - self._start) / self._count * (self._total - self._count)
        return f"  (about {math.ceil(seconds / 60)} min left)" if seconds >= 60 else ""


def values(row: Row) -> str:
    """Return the averaged model's metrics in a row, as text."""
    return "  ".join(f"{k} {'nan' if v is None else f'{v:.4g}'}" for k, v in row.get("averaged", {}).items())


@contextmanager
def following(path: Path, watch: Watch) -> Iterator[None]:
    """Call `watch` with each row that a worker appends to its file from now on."""
    over = threading.Event()
    start = path.stat().st_size if path.exists() else 0

    def follow() -> None:
        offset = start
        while True:
            last = over.is_set()
            if path.exists():
                with path.open() as file:
                    if path.stat().st_size < offset:
                        offset = 0  # a resumed run rewrites the file
                    file.seek(offset)
                    text = file.read()
                whole, newline, _ = text.rpartition("\n")
                offset += len((whole + newline).encode())
                for line in whole.splitlines():
                    watch(json.loads(line))
            if last:
                return
            over.wait(POLL)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5.0)


def summary_writer() -> type[SummaryWriter]:
    """Return TensorBoard's class; raise `InputError` if the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboard; pip install tensorboard, or leave the option out"
        ) from None
    return SummaryWriter


def tensorboard(folder: Path) -> Watch:
    """Return a function that writes each row as scalars to the run's folder."""
    writer = summary_writer()(str(folder / "tensorboard"))
    atexit.register(writer.close)  # a run that is stopped keeps its last steps

    def write(row: Row) -> None:
        for key, value in row.items():
            if key in ("workers", "time"):
                continue  # the workers' exchanges, and a time that TensorBoard has itself
            if isinstance(value, dict):
                for name, number in value.items():
                    writer.add_scalar(f"{key}/{name}", number, row["step"])
            elif isinstance(value, float):
                writer.add_scalar(f"train/{key}", value, row["step"])
        if "averaged" in row:
            writer.flush()

    return write
