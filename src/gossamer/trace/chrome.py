"""Chrome trace JSON, as torch.profiler writes it and Perfetto (ui.perfetto.dev) and chrome://tracing open it.

A process is a node, a thread is a worker. A worker's exchanges overlap its compute, and slices of one thread must
nest, so each bucket's exchanges have a thread of their own below their worker's.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.trace.log import Trace
from gossamer.trace.span import CATEGORIES, FAMILIES, Span

EXCHANGE_ROWS = 100_000  # thread ids of exchange rows: EXCHANGE_ROWS * (bucket + 1) + worker
# chrome://tracing's own color names, nearest to blue, grey, red
CHROME_COLORS = {"compute": "rail_response", "communication": "grey", "waiting": "terrible"}


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds."""
    events: list[dict[str, Any]] = []
    rows: dict[tuple[int, int], str] = {}
    for node in sorted(set(trace.node)):
        events.append(_meta("process_name", node, 0, name=f"node {node}"))
        events.append(_meta("process_sort_index", node, 0, sort_index=node))
    for worker, node in enumerate(trace.node):
        rows[node, worker] = f"worker {worker}"
    for s in trace.spans:
        node, tid = trace.node[s.worker], s.worker
        if s.category == "exchange":
            bucket = int(s.attrs.get("bucket", 0))
            tid += EXCHANGE_ROWS * (bucket + 1)
            rows[node, tid] = f"worker {s.worker} exchange, bucket {bucket}"
        events.append(
            {
                "ph": "X",
                "cat": s.category,
                "name": _name(s),
                "pid": node,
                "tid": tid,
                "ts": round(s.start * 1e6, 3),
                "dur": round(s.seconds * 1e6, 3),
                "cname": CHROME_COLORS[FAMILIES[s.category]],
                "args": {"worker": s.worker, **s.attrs},
            }
        )
    for (node, tid), name in rows.items():
        worker, row = tid % EXCHANGE_ROWS, tid // EXCHANGE_ROWS
        events.append(_meta("thread_name", node, tid, name=name))
        events.append(_meta("thread_sort_index", node, tid, sort_index=worker * 1000 + row))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "gossamer", "rank": 0, "world_size": trace.workers},
        "gossamer": {"node": list(trace.node), "label": trace.label},
        "traceEvents": events,
    }


def write_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace; a name that ends in .gz is compressed (Perfetto opens both)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_chrome(trace), separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def read_chrome(path: str | Path) -> Trace:
    """Read a trace that `write_chrome` wrote, or any Chrome trace whose events have our categories."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(
            f"{path} is not JSON; pass a Chrome trace written by 'gossamer trace merge' or 'simulate --trace'"
        ) from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{path} has no 'traceEvents' list; pass a Chrome trace")
    spans, node_of = [], {}
    for e in events:
        if not isinstance(e, dict) or e.get("ph") != "X" or e.get("cat") not in CATEGORIES:
            continue
        attrs = dict(e.get("args") or {})
        worker = int(attrs.pop("worker", int(e["tid"]) % EXCHANGE_ROWS))
        node_of[worker] = int(e["pid"])
        start = float(e["ts"]) / 1e6
        spans.append(Span(e["cat"], worker, start, start + float(e["dur"]) / 1e6, attrs))
    if not spans:
        raise InputError(f"{path} has no span of a category Gossamer knows ({', '.join(CATEGORIES)})")
    ours = data.get("gossamer", {}) if isinstance(data, dict) else {}
    node = tuple(ours.get("node") or (node_of.get(w, 0) for w in range(max(node_of) + 1)))
    missing = sorted(set(range(len(node))) - set(node_of))
    if missing:
        raise InputError(
            f"{path} has no span of worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))} "
            f"of {len(node)}; merge the files of all workers"
        )
    spans.sort(key=lambda s: (s.start, s.worker))
    return Trace(tuple(spans), node, str(ours.get("label") or path.stem))


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
