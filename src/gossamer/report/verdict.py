"""The verdict of a comparison, one sentence per setting: how much faster, and how good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.report.runs import Group, Run, baseline, by_setting, progress, summary


def verdict(groups: Sequence[Group]) -> str:
    """Return one sentence per setting, or how far the runs are if none is finished."""
    runs = [r for g in groups for r in g.runs]
    if not all(r.finished for r in runs):
        return f"No verdict yet, because no run is finished: {progress(runs)}."
    return " ".join(_sentence(same) for same in by_setting(groups))


def _sentence(groups: Sequence[Group]) -> str:
    """Describe the fastest method whose metric is not worse than the baseline's, or the best one if all are worse.

    Its metric and its validation loss are judged against the noise of the seeds.
    """
    rows = {r["method"]: r for r in summary(groups)}
    base = rows[baseline(groups).label]
    others = [r for r in rows.values() if r is not base]
    first = groups[0].runs[0]
    if not others:
        return (
            f"{base['method']} reached {base['metric']} {_plus_minus(base, 'metric')} after {base['steps']} steps, "
            f"{_duration(base['step_seconds'])} each ({_clock(first)})."
        )
    sign = 1 if first.content["higher_is_better"] else -1
    good = [r for r in others if judged(r, base, "metric", sign) != "worse"]
    if good:
        chosen = min(good, key=lambda r: r["step_seconds"])
    else:
        chosen = max(others, key=lambda r: sign * r["metric_mean"])
    speed = _speed(base["step_seconds"] / chosen["step_seconds"])
    text = f"{chosen['method']} is {speed} {base['method']} ({_clock(first)}), and "
    text += f"after {_steps(chosen, base)} its {_quality(chosen, base, 'metric', chosen['metric'], sign)}"
    if first.metric != "loss":
        text += f", its {_quality(chosen, base, 'loss', 'validation loss', -1)}"
    text += _seeds(min(chosen["seeds"], base["seeds"]))
    if chosen["seconds_to_baseline_loss"] is not None and base["seconds"]:
        share = chosen["seconds_to_baseline_loss"] / base["seconds"]
        text += f"; it had {base['method']}'s final loss after {share:.0%} of {base['method']}'s time"
    return text + "."


def judged(row: dict[str, Any], base: dict[str, Any], key: str, sign: int) -> str:
    """Return `better`, `worse` or `within noise`.

    Within noise means no further from the baseline's mean than the larger standard deviation over seeds. The noise of
    one seed is unknown, so that only equal values are `equal`.
    """
    gain = sign * (row[f"{key}_mean"] - base[f"{key}_mean"])
    if min(row["seeds"], base["seeds"]) > 1 and abs(gain) <= max(row[f"{key}_std"], base[f"{key}_std"]):
        return "within noise"
    return "equal" if gain == 0 else "better" if gain > 0 else "worse"


def _quality(row: dict[str, Any], base: dict[str, Any], key: str, name: str, sign: int) -> str:
    return f"{name} is {judged(row, base, key, sign)} ({_plus_minus(row, key)} against {_plus_minus(base, key)})"


def _steps(row: dict[str, Any], base: dict[str, Any]) -> str:
    if row["steps"] == base["steps"]:
        return f"the same {base['steps']} steps"
    return f"{row['steps']} steps (against {base['steps']})"


def _speed(ratio: float) -> str:
    return f"{ratio:.2f} times as fast as" if ratio >= 1 else f"slower than ({ratio:.2f} times the speed of)"


def _seeds(count: int) -> str:
    return f" over {count} seeds" if count > 1 else " with one seed, whose noise is unknown"


def _clock(run: Run) -> str:
    clock = run.clock
    if clock["kind"] == "simulated":
        return f"simulated on {clock['cluster'] or 'the described cluster'}, {clock['layout']}"
    if clock.get("link"):
        how = "shaped" if clock.get("network") == "namespaces" else "paced"
        return f"measured, links {how} to {clock['link']}"
    return "measured"


def _plus_minus(row: dict[str, Any], key: str) -> str:
    mean, std = row[f"{key}_mean"], row[f"{key}_std"]
    return f"{mean:.4g} ± {std:.2g}" if row["seeds"] > 1 else f"{mean:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
