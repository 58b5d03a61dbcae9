"""Chrome trace JSON, the format of torch.profiler, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a node and a thread is a worker, both counted from 1, because Perfetto treats number 0 as the idle thread.
The exchanges of a worker overlap its compute, but slices of one thread must nest, so the exchanges of each bucket have
a thread of their own below that of the worker.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.trace.log import MOST_WORKERS, Trace
from gossamer.trace.span import CATEGORIES, FAMILIES, Span, real, whole

MOST_BYTES = 1 << 29  # of an unpacked file, which can be much larger than the packed one
EXCHANGE_ROWS = 100_000  # thread ids of exchange rows: EXCHANGE_ROWS * (bucket + 1) + worker + 1
# the color names of chrome://tracing that are nearest to blue, gray and red
CHROME_COLORS = {"compute": "rail_response", "communication": "grey", "waiting": "terrible"}


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Return the trace as a JSON object; times are in microseconds."""
    events: list[dict[str, Any]] = []
    rows: dict[tuple[int, int], str] = {}
    for node in sorted(set(trace.node)):
        events.append(_meta("process_name", node + 1, 0, name=f"node {node}"))
        events.append(_meta("process_sort_index", node + 1, 0, sort_index=node))
    for worker, node in enumerate(trace.node):
        rows[node + 1, worker + 1] = f"worker {worker}"
    for s in trace.spans:
        pid, tid = trace.node[s.worker] + 1, s.worker + 1
        if s.category == "exchange":
            bucket = int(s.attrs.get("bucket", 0))
            tid += EXCHANGE_ROWS * (bucket + 1)
            rows[pid, tid] = f"worker {s.worker} exchange, bucket {bucket}"
        begin, end = round(s.start * 1e6, 3), round(s.end * 1e6, 3)
        events.append(
            {
                "ph": "X",
                "cat": s.category,
                "name": _name(s),
                "pid": pid,
                "tid": tid,
                "ts": begin,
                "dur": round(end - begin, 3),  # of rounded times, so that neighbors do not overlap
                "cname": CHROME_COLORS[FAMILIES[s.category]],
                "args": {"worker": s.worker, **s.attrs},
            }
        )
    for (pid, tid), name in rows.items():
        worker, row = (tid - 1) % EXCHANGE_ROWS, tid // EXCHANGE_ROWS
        events.append(_meta("thread_name", pid, tid, name=name))
        events.append(_meta("thread_sort_index", pid, tid, sort_index=worker * 1000 + row))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "gossamer", "rank": 0, "world_size": trace.workers},
        "gossamer": {"node": list(trace.node), "label": trace.label},
        "traceEvents": events,
    }


def write_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace; a file whose name ends in .gz is compressed (Perfetto opens both)."""
    path = Path(path)
    data = json.dumps(to_chrome(trace), separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another place") from None
    return path


def read_chrome(path: str | Path) -> Trace:
    """Read a trace of `write_chrome`, or any Chrome trace whose events have Gossamer's categories."""
    path = Path(path)
    data = _load(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{path} has no 'traceEvents' list; pass a Chrome trace")
    ours = data.get("gossamer") if isinstance(data, dict) else None
    said = ours if isinstance(ours, dict) else {}
    spans, node_of = [], {}
    for number, e in enumerate(events):
        if not isinstance(e, dict) or e.get("ph") != "X" or e.get("cat") not in CATEGORIES:
            continue
        try:
            attrs = dict(e.get("args") or {})
            worker = attrs.pop("worker") if "worker" in attrs else (e["tid"] - 1) % EXCHANGE_ROWS
            start = real(e["ts"]) / 1e6
            span = Span.checked(e["cat"], worker, start, start + real(e["dur"]) / 1e6, attrs, MOST_WORKERS)
            node_of[span.worker] = whole(e["pid"], "pid", 1 << 32)
        except (ValueError, TypeError, KeyError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"has a wrong value ({error})"
            raise InputError(f"event {number} of {path} {what}; record the trace again") from None
        spans.append(span)
    if not spans:
        raise InputError(f"{path} has no span of a category that Gossamer knows ({', '.join(CATEGORIES)})")
    node = _nodes(path, said.get("node"), node_of)
    missing = sorted(set(range(len(node))) - set(node_of))
    if missing:
        raise InputError(
            f"{path} has no span of worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} "
            f"of {len(node)}; merge the files of all workers"
        )
    strangers = [s for s in spans if max(s.worker, s.attrs.get("peer") or 0) >= len(node)]
    if strangers:
        who = max(strangers[0].worker, strangers[0].attrs.get("peer") or 0)
        raise InputError(f"{path} mentions worker {who} but has {len(node)} workers; record the trace again")
    spans.sort(key=lambda s: (s.start, s.worker))
    return Trace(tuple(spans), node, str(said.get("label") or path.stem)[:200])


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}; check the path, or write it again") from None
    if len(raw) > MOST_BYTES:
        raise InputError(f"{path} holds more than {MOST_BYTES >> 20} MiB; merge fewer steps")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError(
            f"{path} is not JSON; pass a Chrome trace written by 'gossamer trace merge' or 'simulate --trace'"
        ) from None


def _nodes(path: Path, said: Any, node_of: dict[int, int]) -> tuple[int, ...]:
    """Return the node of every worker: from Gossamer's own entry if there is one, else from the processes."""
    if said is None:
        number = {pid: m for m, pid in enumerate(sorted(set(node_of.values())))}
        return tuple(number.get(node_of.get(w, -1), 0) for w in range(max(node_of) + 1))
    try:
        return tuple(whole(m, "node", MOST_WORKERS) for m in said)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} has a wrong list of nodes ({error}); record the trace again") from None


def _name(span: Span) -> str:
    a = span.attrs
    if span.category == "exchange":
        return f"exchange {a['bucket']}" if "bucket" in a else "exchange"
    if span.category == "wait":
        whom = f"worker {a['peer']}" if "peer" in a else f"link {a['link']}" if "link" in a else ""
        return f"wait for {whom}" if whom else "wait"
    return span.category


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
