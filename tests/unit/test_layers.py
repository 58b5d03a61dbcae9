"""The layers: who may import whom. The checker reads the source, so that a lazy import counts as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gossamer"


@dataclass(frozen=True)
class Layer:
    """What a layer may import of Gossamer; `torch` and `distributed` say whether it may use those."""

    ours: frozenset[str]
    torch: bool = True
    distributed: bool = False
    public: bool = False  # may use `import gossamer`


def _layer(*ours: str, torch: bool = True, distributed: bool = False, public: bool = False) -> Layer:
    return Layer(frozenset({"errors", *ours}), torch, distributed, public)


LAYERS = {
    "errors": _layer(torch=False),
    "native": _layer(torch=False),
    "topology": _layer(torch=False),
    "trace": _layer(torch=False),
    "predict": _layer("topology", "trace", torch=False),
    "comm": _layer("native", "topology", "trace", distributed=True),
    "engine": _layer("comm", "predict", "topology", "trace"),
    "checkpoint": _layer(public=True),
    "integrations": _layer("checkpoint", public=True),
    "optim": _layer("native"),
    # comm: a process group and torch's DDP for `bench`
    "lab": _layer("topology", "predict", "trace", "comm", public=True),
    "recipes": _layer(public=True),
    "report": _layer("trace", "predict", "topology"),
}
LAYERS["jobs"] = _layer(*LAYERS, public=True)  # everything but cli
LAYERS["cli"] = _layer(*LAYERS, public=True)
LAYERS["__main__"] = _layer("cli", torch=False)
LAYERS["__init__"] = _layer(*LAYERS)  # the public face re-exports from every layer


def violations(root: Path) -> list[str]:
    """Every import under `root` (a `gossamer` package) that breaks the layers, as `file:line: what`."""
    found = []
    for file in sorted(root.rglob("*.py")):
        layer = file.relative_to(root).parts[0].removesuffix(".py")
        for line, why in _broken(ast.parse(file.read_text()), layer, file, root):
            found.append(f"{file.relative_to(root)}:{line}: {why}")
    return found


def _broken(tree: ast.Module, layer: str, file: Path, root: Path) -> Iterator[tuple[int, str]]:
    if layer not in LAYERS:
        yield 1, f"unknown layer {layer!r}; say in this test what it may import"
        return
    rule = LAYERS[layer]
    for line, name, public in _uses(tree, file, root):
        top, _, rest = name.partition(".")
        if top == "torch":
            if not rule.torch:
                yield line, f"{layer} must not use torch"
            elif rest.split(".")[0] == "distributed" and not rule.distributed:
                yield line, f"only comm may use torch.distributed, not {layer}"
        elif top == "gossamer":
            target = rest.split(".")[0]
            if not target or public:
                if not rule.public and layer not in ("__init__", "__main__"):
                    yield line, f"{layer} must not import the public package gossamer"
            elif target != layer and target not in rule.ours:
                yield line, f"{layer} must not import gossamer.{target}"


def _uses(tree: ast.Module, file: Path, root: Path) -> Iterator[tuple[int, str, bool]]:
    """`(line, dotted name, whether it is a name of the public package)` of everything imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = ["gossamer", *file.relative_to(root).parent.parts]
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                part = root / alias.name
                public = module == "gossamer" and not (part.is_dir() or part.with_suffix(".py").is_file())
                yield node.lineno, name, public
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, f"torch.{node.attr}", False
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
            in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value), False


def test_layers_hold() -> None:
    assert violations(SOURCE) == []


def test_every_layer_of_the_design_is_there() -> None:
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders == set(LAYERS) - {"errors", "native", "__main__", "__init__"}


def _table_of_rooms() -> dict[str, str]:
    """The folders in the table of CONTRIBUTING.md, and what the table says that they may import."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_/]+)/` \| .+ \| (.+) \|$", section, re.M)
    assert len(rows) == len(dict(rows)), "a folder is listed twice"
    return dict(rows)


def test_contributing_lists_every_folder() -> None:
    folders = {p.parent.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*") if p.is_file()}
    assert set(_table_of_rooms()) == {f for f in folders if f != "." and "__pycache__" not in f}


def test_contributing_says_what_a_room_may_import() -> None:
    for folder, may in _table_of_rooms().items():
        room, _, inside = folder.partition("/")
        if inside:
            assert may == f"as `{room}/`", folder
        elif room in ("jobs", "cli"):
            assert may == {"jobs": "everything but `cli`", "cli": "everything"}[room]
        else:
            named = set(re.findall(r"`(\w+)`", may))
            assert named == LAYERS[room].ours - {"errors"}, folder
            assert ("the public API" in may) == LAYERS[room].public, folder


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        ("topology/x.py", "import torch", "topology must not use torch"),
        ("topology/x.py", "def f():\n    from torch.nn import Linear", "topology must not use torch"),
        ("predict/x.py", "from gossamer.comm import gloo", "predict must not import gossamer.comm"),
        ("predict/x.py", "from ..engine import lane", "predict must not import gossamer.engine"),
        ("trace/x.py", "from gossamer import topology", "trace must not import gossamer.topology"),
        ("trace/x.py", "import gossamer", "trace must not import the public package gossamer"),
        ("engine/x.py", "import torch.distributed as dist", "only comm may use torch.distributed, not engine"),
        ("engine/x.py", "from torch import distributed", "only comm may use torch.distributed, not engine"),
        ("cli/x.py", "import torch\ntorch.distributed.is_available()", "only comm may use torch.distributed, not cli"),
        ("optim/x.py", "from gossamer.topology import Layout", "optim must not import gossamer.topology"),
        ("recipes/x.py", "from gossamer.engine.sync import Gossip", "recipes must not import gossamer.engine"),
        (
            "report/x.py",
            "import importlib\nimportlib.import_module('gossamer.lab')",
            "report must not import gossamer.lab",
        ),
        ("surprise/x.py", "", "unknown layer 'surprise'; say in this test what it may import"),
    ],
)
def test_the_checker_catches(tmp_path: Path, file: str, source: str, why: str) -> None:
    root = tmp_path / "gossamer"
    for folder in ("topology", "engine", "comm", "lab"):
        (root / folder).mkdir(parents=True)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(source)
    assert [v.partition(": ")[2] for v in violations(root)] == [why]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "topology/x.py",
            "from gossamer.errors import InputError\nfrom gossamer.topology.core import Round\nfrom . import core",
        ),
        ("comm/x.py", "import torch.distributed as dist\nfrom gossamer.topology import Round"),
        ("recipes/x.py", "import gossamer\nfrom gossamer import AccumAdamW, decentralize\nimport torch"),
        ("cli/x.py", "from gossamer.lab import cluster\nimport gossamer"),
    ],
)
def test_the_checker_accepts(tmp_path: Path, file: str, source: str) -> None:
    root = tmp_path / "gossamer"
    (root / "topology").mkdir(parents=True)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(source)
    assert violations(root) == []
