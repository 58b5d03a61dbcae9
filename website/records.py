"""Pages of the evidence: one per folder of benchmarks/records, so that no number is written twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks" / "records"
PICTURES = {".svg", ".png"}
KINDS = {
    "How fast": (
        "bench-",
        "time-to-loss",
        "thin-links",
        "links",
        "async-overhead",
        "engine-overhead",
        "engine-memory",
        "optim",
    ),
    "How good": (
        "quality-",
        "flagship-",
        "thin-quality-",
        "noise-scale",
        "overlap-stability",
        "wire",
        "a2cid2-stationary",
    ),
    "How well predicted": ("paper-prediction", "predict-", "simulator"),
    "What failures cost": ("chaos", "goodput", "partition", "soak", "rejoin", "checkpoint-"),
}


def names() -> list[str]:
    """Return the names of all records, sorted. A folder with nothing but raw runs belongs to an unfinished study."""
    return sorted(
        path.name for path in RECORDS.iterdir() if path.is_dir() and any(map(_says_something, path.iterdir()))
    )


def _says_something(path: Path) -> bool:
    return path.suffix in {".md", ".txt"} or path.name == "record.json"


def attachments(name: str) -> list[str]:
    """Return the pictures of a record, relative to its folder."""
    folder = RECORDS / name
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in PICTURES)


def facts(name: str) -> dict[str, Any]:
    """Return what the record says about itself: command, date, machine; {} if it has no record.json."""
    path = RECORDS / name / "record.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return data if isinstance(data, dict) else {}


def page(name: str) -> str:
    """Return the record's own README with its pictures, or its texts if it has none."""
    folder = RECORDS / name
    readme = folder / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
    else:
        parts = [f"# {name}"]
        parts += [_quoted(path) for path in sorted(folder.iterdir()) if path.suffix in {".md", ".txt"}]
        text = "\n\n".join(parts)
    missing = [path for path in attachments(name) if path not in text]
    pictures = "".join(f"\n\n![{Path(path).stem} of {name}]({path})" for path in missing)
    raw = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json*"))
    listed = ", ".join(f"`{path}`" for path in raw[:6]) + (f" and {len(raw) - 6} more" if len(raw) > 6 else "")
    source = f"\n\n---\n\nRecorded {date(name)}. Folder `benchmarks/records/{name}`" + (f": {listed}" if raw else "")
    return f"{text}{pictures}{source}.\n"


def date(name: str) -> str:
    """Return when the record was made, as it says itself."""
    return str(facts(name).get("date", "without a date"))


def by_kind() -> dict[str, list[str]]:
    """Return the records by the question that they answer."""
    left, found = names(), {}
    for kind, prefixes in KINDS.items():
        found[kind] = [name for name in left if name.startswith(prefixes)]
        left = [name for name in left if name not in found[kind]]
    return {**found, "Others": left} if left else found


def index() -> str:
    """Return the page that lists every record."""
    introduction = (
        "Every number about speed, quality or failures that these pages state comes from a record: a folder with the "
        "command, the machine, the versions and the raw samples. The pages below are made from these folders when the "
        "site is built. All records are of one machine with two cores unless they say otherwise; run the command of a "
        "record to repeat it."
    )
    return "\n\n".join(["# Evidence", introduction, *(_table(kind, mine) for kind, mine in by_kind().items())]) + "\n"


def _table(kind: str, mine: list[str]) -> str:
    rows = [f"| [{name}]({name}/README.md) | {_summary(name)} | {date(name)} |" for name in mine]
    return "\n".join([f"## {kind}", "", "| record | what was measured | date |", "|---|---|---|", *rows])


def _summary(name: str) -> str:
    """Return the first sentence of the record that is neither heading, command, table nor the machine."""
    readme = RECORDS / name / "README.md"
    if not readme.exists():
        return "step times of the optimizers, and the forms of GossipAdam"
    for block in re.split(r"\n\s*\n|\n(?=AMD|Intel)|(?<=cpu\.)\s", readme.read_text(encoding="utf-8")):
        block = " ".join(block.split())
        if block and not block.startswith(("#", "python ", "gossamer ", "|", "AMD", "Intel", "Python 3", "!")):
            sentence = re.split(r"(?<=[a-z)\d*])[.:;] ", block)[0].rstrip(".:;")
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence).replace("|", "\\|").replace("**", "")
    return ""


def _quoted(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text.replace("\n# ", "\n## ") if path.suffix == ".md" else f"```text\n{text}\n```"
