"""What the tests of `examples/launch` share: the stand-ins of launchers, and the files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples" / "launch"
STAND_INS = Path(__file__).parent / "launchers"
SLURM_JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "127.0.0.1,localhost", "SLURM_NTASKS_PER_NODE": "2"}


def environment(**more: str) -> dict[str, str]:
    """Where the stand-ins are found before everything else, and no launcher has set a variable."""
    paths = [str(STAND_INS), str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(STAND_INS), *(p for p in sys.path if p)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI_", "GOSSAMER_"))}
    return {
        **kept,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join(modules),
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
        **more,
    }


def run(script: str, *arguments: str, **env: str) -> str:
    """The output of a script of `examples/launch`, run from the root of the repository."""
    done = subprocess.run(
        ["bash", str(LAUNCH / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment(**env),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def parsed(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


def elastic_objects() -> dict[str, Any]:
    """The objects of the elastic job on Kubernetes, by kind."""
    text = (LAUNCH / "kubernetes_elastic.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def container_of(workload: Any) -> Any:
    """The only container of a Job or a Deployment."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container
