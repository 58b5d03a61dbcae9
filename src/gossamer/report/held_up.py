"""What held a run up: a slow worker, a slow link or small buckets, from its timeline or its waits; and what to change.

A timeline (`trace-*.jsonl`) says for every wait whether the peer had not launched its exchange (the peer is late) or
the link was still sending. Without one, the waits of all workers still tell a slow worker, which waits least, from a
slow link, for which all wait alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gossamer.errors import InputError
from gossamer.report.waits import damaged, deadlines_in, wait_rows
from gossamer.topology import Layout
from gossamer.trace import Trace, merge
from gossamer.trace.analysis import stragglers

WORTH_NAMING = 0.05  # share of the workers' time that waits must take
SLOWER = 1.15  # times the median compute time, from which a worker counts as slow
IDLE = 0.5  # a worker that waits less than this share of the median wait is the one the others wait for
SMALL = 64 * 2**10  # bytes; the engine makes no smaller buckets
MANY = 16  # buckets per step, from which their overhead can matter
Kind = Literal["nothing", "worker", "link", "buckets", "jitter"]
CHANGES: dict[Kind, str] = {
    "nothing": "",
    "worker": (
        "Give worker {what} less work or a healthy machine; if it is slow only at times, AWC(staleness=1) hides single "
        "late steps, and algorithm='a2cid2' lets every worker go at its own pace."
    ),
    "link": (
        "Send less over {what}: gradients='node', wire='bf16', AWC(every=2), or a topology that uses it less "
        "(gossamer topology list); gossamer probe shows whether this link is slower than the others."
    ),
    "buckets": "Leave Exchange(bucket_mib=...) out, or pass at least {what}.",
    "jitter": (
        "The workers take turns at being late: AWC(staleness=1) hides single late steps, and a one-peer topology waits "
        "for fewer workers than a complete one."
    ),
}


@dataclass(frozen=True)
class HeldUp:
    """The cause that held one run up most. `share` is the part of the workers' time that they waited for it."""

    run: str
    kind: Kind
    cause: str
    share: float
    waiting: float
    sentence: str
    change: str
    deadline_seconds: tuple[float, float] | None = None
    """The shortest and the longest time that an exchange waited for a neighbor; only elastic runs have one."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_up_in(folder: Path) -> list[HeldUp]:
    """Return one finding for every run below a folder that has a timeline or recorded waits."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass the --out of gossamer train or compare, or a trace folder")
    traced = sorted({f.parent for f in folder.rglob("trace-*.jsonl")})
    found = [_beside_deadlines(in_trace(merge(place), _name(folder, place)), _run_of(place)) for place in traced]
    known = {_run_of(place) for place in traced}
    for place in sorted({f.parent for f in folder.rglob("waits-*.json")} - known):
        found.append(_beside_deadlines(in_waits(place, _name(folder, place)), place))
    return found


def _run_of(place: Path) -> Path:
    """The folder of the run whose timeline is in `place`."""
    return place.parent if place.name == "trace" else place


def _beside_deadlines(found: HeldUp, folder: Path) -> HeldUp:
    """Add how long an exchange of an elastic run waits at most."""
    deadlines = deadlines_in(folder)
    if deadlines is None:
        return found
    low, high = (f"{seconds:.2g}" for seconds in deadlines)
    said = f"{found.sentence} An exchange waits at most {low if low == high else f'{low} to {high}'} s for a neighbor."
    return replace(found, sentence=said, deadline_seconds=deadlines)


def _name(folder: Path, place: Path) -> str:
    inside = _run_of(place)
    return str(inside.relative_to(folder)) if inside != folder else folder.name


def in_trace(trace: Trace, run: str) -> HeldUp:
    """Return what held up the run of a timeline."""
    causes = stragglers(trace)
    waiting = sum(c.share for c in causes)
    if waiting < WORTH_NAMING:
        return _nothing(run, waiting)
    small = _small_buckets(trace)
    if small is not None:
        count, size = small
        return _found(
            run, "buckets", "buckets", waiting, waiting, f"{count} buckets of {size / 1024:.3g} KiB per exchange", "1"
        )
    slow = _slow_worker(trace)
    by_worker = {c.cause: c.share for c in causes if c.cause.startswith("worker ")}
    links = [c for c in causes if c.cause.startswith(("link ", "inside node "))]
    links.sort(key=lambda c: (-c.mutual, -c.share))  # both ends wait for a slow link
    late = sum(by_worker.values())
    if slow is not None and late >= sum(c.share for c in links):
        worker, ratio = slow
        what = f"worker {worker} computes {ratio:.2g} times as long as the others"
        return _found(run, "worker", f"worker {worker}", late, waiting, what, str(worker))
    if links and links[0].share >= 0.5 * max(by_worker.values(), default=0.0):
        return _found(
            run, "link", links[0].cause, links[0].share, waiting, f"{links[0].cause} was slow", links[0].cause
        )
    if slow is not None:
        worker, ratio = slow
        what = f"worker {worker} computes {ratio:.2g} times as long as the others"
        return _found(run, "worker", f"worker {worker}", late, waiting, what, str(worker))
    return _found(run, "jitter", "jitter", late, waiting, "workers were late in turn", "")


def _slow_worker(trace: Trace) -> tuple[int, float] | None:
    """The worker whose compute takes longest and its time over the others' median, if it stands out."""
    spent: dict[int, float] = defaultdict(float)
    steps: dict[int, set[int]] = defaultdict(set)
    for s in trace.spans:
        if s.family == "compute" and s.category != "step":
            spent[s.worker] += s.seconds
            steps[s.worker].add(int(s.attrs.get("step", 0)))
    means = {w: seconds / max(1, len(steps[w])) for w, seconds in spent.items()}
    if len(means) < 2:
        return None
    worst = max(means, key=means.__getitem__)
    usual = statistics.median(v for w, v in means.items() if w != worst)
    return (worst, means[worst] / usual) if usual and means[worst] > SLOWER * usual else None


def _small_buckets(trace: Trace) -> tuple[int, float] | None:
    """The number of buckets and their mean size, if they are many and small."""
    sizes = [s.attrs["bytes"] for s in trace.spans if s.category == "exchange" and s.attrs.get("bytes")]
    count = 1 + max((int(s.attrs.get("bucket", 0)) for s in trace.spans if s.category == "exchange"), default=0)
    if not sizes or count < MANY or statistics.fmean(sizes) >= SMALL:
        return None
    return count, statistics.fmean(sizes)


def in_waits(folder: Path, run: str) -> HeldUp:
    """Return what held up a run that recorded its waits, but no timeline."""
    try:
        rows = wait_rows(folder)
        node = Layout.of(rows[0]["per_node"]).node
        shares = {int(r["worker"]): r["waited"] / max(1e-9, r["seconds"]) for r in rows}
        by_link = _link_shares(rows, node)
        buckets, size = int(rows[0]["buckets"]), float(rows[0]["bucket_bytes"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise damaged(folder) from None
    waiting = statistics.fmean(shares.values())
    if waiting < WORTH_NAMING:
        return _nothing(run, waiting)
    if buckets >= MANY and size < SMALL:
        return _found(run, "buckets", "buckets", waiting, waiting, f"{buckets} buckets of {size / 1024:.3g} KiB", "1")
    least = min(shares, key=shares.__getitem__)
    others = statistics.median(v for w, v in shares.items() if w != least) if len(shares) > 1 else 0.0
    if shares[least] < IDLE * others:
        what = f"worker {least} waits {shares[least]:.0%} of its time and the others {others:.0%}, so they wait for it"
        return _found(run, "worker", f"worker {least}", waiting, waiting, what, str(least))
    if not by_link:
        return _found(run, "jitter", "jitter", waiting, waiting, "workers were late in turn", "")
    worst = max(by_link, key=by_link.__getitem__)
    what = f"most waits were on {worst} (train with --trace to tell a slow link from late workers)"
    return _found(run, "link", worst, by_link[worst], waiting, what, worst)


def _link_shares(rows: list[dict[str, Any]], node: tuple[int, ...]) -> dict[str, float]:
    """The share of the workers' time in which both ends of each link waited alike."""
    sides: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for r in rows:
        here = node[int(r["worker"])]
        for peer, seconds in r["by_peer"].items():
            a, b = sorted((here, node[int(peer)]))
            name = f"inside node {a}" if a == b else f"link {a}-{b}"
            sides[name][here] += seconds / max(1e-9, r["seconds"]) / len(rows)
    both = {name: 2 * min(s.values()) if len(s) > 1 else 0.0 for name, s in sides.items()}
    inside = {name: sum(s.values()) for name, s in sides.items() if name.startswith("inside")}
    return {**both, **inside}


def _nothing(run: str, waiting: float) -> HeldUp:
    said = f"nothing held it up: workers waited {waiting:.1%} of the time, so compute is the limit."
    return HeldUp(run, "nothing", "compute", 0.0, waiting, said, "")


def _found(run: str, kind: Kind, cause: str, share: float, waiting: float, what: str, name: str) -> HeldUp:
    sentence = (
        f"workers waited {waiting:.0%} of the time; {what}, which accounts for {min(1.0, share / waiting):.0%} of it."
    )
    return HeldUp(run, kind, cause, share, waiting, sentence, CHANGES[kind].format(what=name))
