"""A lean import: what is loaded when, and what works without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""
LOADED = "\nimport sys, json; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module", ["gossamer", "gossamer.topology", "gossamer.predict", "gossamer.trace", "gossamer.cli"]
)
def test_imports_with_torch_blocked(module: str) -> None:
    _python(f"{BLOCK_TORCH}\nimport {module}")


def test_the_block_works() -> None:
    assert "blocked" in _python(f"{BLOCK_TORCH}\ntry:\n    import torch\nexcept ImportError as e:\n    print(e)")


def test_import_gossamer_is_lean() -> None:
    loaded = set(json.loads(_python("import gossamer" + LOADED)))
    assert not loaded & {"torch", "scipy", "networkx", "pydantic", "matplotlib", "plotly", "typer", "rich"}


def test_help_of_every_command_needs_nothing_heavy() -> None:
    code = (
        "import contextlib, io\nfrom gossamer.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert main(['--help']) == 0\n"
        "    assert all(main([c, '--help']) == 0 for c in COMMANDS)\n"
    )
    loaded = set(json.loads(_python(code + LOADED)))
    assert not loaded & {"torch", "scipy", "networkx", "matplotlib", "plotly"}


def test_the_engine_does_not_load_what_only_sharded_models_need() -> None:
    code = "import gossamer.engine, sys; print('torch.distributed.fsdp' in sys.modules)"
    assert _python(code).strip() == "False"


def test_topology_needs_no_plotting_package() -> None:
    loaded = set(json.loads(_python("import gossamer.topology" + LOADED)))
    assert not loaded & {"torch", "matplotlib", "plotly", "typer", "rich"}


def test_jobs_do_not_need_the_command_line() -> None:
    code = "import gossamer.jobs.launched, gossamer.jobs.elastic, gossamer.jobs.compare, gossamer.recipes.run"
    loaded = json.loads(_python(f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert not {"typer", "gossamer.cli"} & set(loaded)


def test_the_main_script_does_not_import_the_command_line_in_a_worker() -> None:
    """Every worker imports the main script of its launcher, under another name than `__main__`."""
    code = "import runpy; runpy.run_module('gossamer', run_name='__mp_main__'); import gossamer.cli"
    assert "typer" not in json.loads(_python(code + LOADED))
