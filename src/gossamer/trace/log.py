"""Trace files that workers write during a run, and merging them afterwards.

A file such as `trace-00003.jsonl` has a header line and then one span per line. Lines are appended and never rewritten,
so that a killed worker loses at most its last, torn line. Times are seconds since the writer's `origin`, a wall-clock
time; `merge` converts the times of all workers to the clock of the earliest origin.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gossamer.errors import InputError
from gossamer.trace.span import Span, real, whole

FORMAT = 1
MOST_WORKERS = 1 << 16
PATTERN = "trace-*.jsonl"


@dataclass(frozen=True)
class TraceHeader:
    """The first line of a file. `node[i]` is the node of worker i; `offset` corrects this worker's clock."""

    worker: int
    node: tuple[int, ...]
    origin: float
    offset: float = 0.0
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Trace:
    """A complete timeline: the spans of all workers on one clock, and the node of each worker."""

    spans: tuple[Span, ...]
    node: tuple[int, ...]
    label: str = ""

    @property
    def workers(self) -> int:
        return len(self.node)


class TraceWriter:
    """Appends the spans of one worker to its file. Any thread may call `record`; `flush` writes.

    `clock` must count seconds, as `time.perf_counter` does. Times are relative to the moment the writer is made.
    """

    def __init__(
        self,
        directory: str | Path,
        worker: int,
        node: Sequence[int],
        *,
        clock: Callable[[], float] = time.perf_counter,
        offset: float = 0.0,
        versions: dict[str, str] | None = None,
        flush_every: int = 1024,
    ) -> None:
        self.worker = worker
        self.path = Path(directory) / f"trace-{worker:05d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock, self._zero, self._flush_every = clock, clock(), flush_every
        self._pending: list[tuple[str, float, float, dict[str, Any]]] = []
        self._lock = threading.Lock()
        self._file = self.path.open("w", encoding="utf-8")
        header = {
            "gossamer_trace": FORMAT,
            "worker": worker,
            "node": list(node),
            "origin": time.time(),
            "offset": offset,
            "versions": versions or {},
        }
        self._file.write(json.dumps(header) + "\n")
        self._file.flush()

    def now(self) -> float:
        """Return the seconds since the writer was made."""
        return self._clock() - self._zero

    def record(self, category: str, start: float, end: float, **attrs: Any) -> None:
        """Record one span; `start` and `end` come from `now()`."""
        with self._lock:
            self._pending.append((category, start, end, attrs))
            full = len(self._pending) >= self._flush_every
        if full:
            self.flush()

    def flush(self) -> None:
        """Write all recorded spans to the file."""
        with self._lock:
            pending, self._pending = self._pending, []
            lines = [
                json.dumps({"category": c, "start": round(s, 7), "end": round(e, 7), **a}) for c, s, e, a in pending
            ]
            if lines:
                self._file.write("\n".join(lines) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Write the remaining spans and close the file; may be called twice."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: str | Path) -> tuple[TraceHeader, list[Span]]:
    """Read one worker's file. A torn last line is ignored; any other unreadable line is an error."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; check the path") from None
    try:
        head = json.loads(lines[0])
        if head["gossamer_trace"] != FORMAT:
            raise InputError(
                f"{path} has trace format {head['gossamer_trace']!r:.40}, this version reads {FORMAT}; record it again"
            )
        node = tuple(whole(m, "node", MOST_WORKERS) for m in head["node"])
        header = TraceHeader(
            whole(head["worker"], "worker", len(node) - 1),
            node,
            real(head["origin"]),
            real(head.get("offset", 0.0)),
            tuple(sorted((str(k), str(v)) for k, v in head.get("versions", {}).items())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} does not begin with a Gossamer trace header; pass files written by a run with trace=..."
        ) from None
    spans = []
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        try:
            entry = json.loads(line)
            times = entry.pop("category"), header.worker, entry.pop("start"), entry.pop("end")
            spans.append(Span.checked(*times, entry, len(node)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number == len(lines):  # no newline after it: the writer was killed while writing the line
                break
            raise InputError(
                f"line {number} of {path} is not a span; remove the line or record the trace again"
            ) from None
    return header, spans


def merge(directory: str | Path) -> Trace:
    """Merge the files of all workers of a run into one timeline that starts at 0."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory; pass the run's directory that holds {PATTERN}")
    paths = sorted(directory.glob(PATTERN)) or sorted(directory.glob(f"*/{PATTERN}"))
    if not paths:
        raise InputError(f"{directory} holds no {PATTERN}; record them with decentralize(..., trace=DIRECTORY)")
    read_files = [read(p) for p in paths]
    node = read_files[0][0].node
    found: dict[int, Path] = {}
    for (header, _), path in zip(read_files, paths, strict=True):
        if header.node != node:
            raise InputError(
                f"{path} has {len(header.node)} workers, {paths[0]} has {len(node)}, or they lie on other nodes; "
                "merge one run at a time"
            )
        if header.worker in found:
            raise InputError(
                f"{path} and {found[header.worker]} are both of worker {header.worker}; merge one run at a time"
            )
        found[header.worker] = path
    missing = sorted(set(range(len(node))) - set(found))
    if missing:
        raise InputError(
            f"the trace in {directory} lacks worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} "
            f"of {len(node)}; copy the missing {PATTERN} files from their hosts"
        )
    begin = min(h.origin + h.offset for h, _ in read_files)
    spans = []
    for header, own in read_files:
        shift = header.origin + header.offset - begin
        spans += [Span(s.category, s.worker, s.start + shift, s.end + shift, s.attrs) for s in own]
    spans.sort(key=lambda s: (s.start, s.worker))
    return Trace(tuple(spans), node, directory.name)
