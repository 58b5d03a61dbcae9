"""`gossamer doctor`: check what this machine has, what is missing, and how to install it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.cli.common import Json, command_app, count_of, print_json, print_rich, rank_ranges, table

if TYPE_CHECKING:
    from gossamer.jobs.layout import SeenJob

app = command_app()

NEEDED = ("torch", "numpy", "scipy", "networkx", "pydantic", "rich", "typer")
OPTIONAL = (
    *("matplotlib", "scikit-learn", "tokenizers", "sacrebleu", "pillow", "tensorboard", "decent-dp"),
    *("accelerate", "lightning", "transformers", "ray"),
)
INSTALLED_AS = {"torch": "'torch>=2.6'", "decent-dp": "decent-dp==0.2.3", "ray": "'ray[train]'"}
USED_BY = {
    "matplotlib": "draws pictures and HTML pages",
    "scikit-learn": "the digits of train and compare vision",
    "tokenizers": "subwords of train and compare translate and lm",
    "sacrebleu": "BLEU of train and compare translate",
    "pillow": "folders of images in train and compare vision",
    "tensorboard": "train --tensorboard",
    "decent-dp": "a method of bench to compare with",
    "accelerate": "gossamer.integrations.accelerate",
    "lightning": "gossamer.integrations.lightning",
    "transformers": "gossamer.integrations.transformers",
    "ray": "gossamer.integrations.ray",
}
OLDEST_TORCH = (2, 6)


@dataclass(frozen=True)
class Check:
    """One check. Gossamer is usable here if all `needed` checks are ok; `remedy` says what to do if one is not."""

    area: str
    name: str
    ok: bool
    detail: str
    needed: bool = False
    remedy: str = ""


@app.command(
    epilog="Examples: gossamer doctor --json\n\ntorchrun --nproc-per-node 2 -m gossamer doctor --job | "
    "srun gossamer doctor --job"
)
def doctor(
    job: Annotated[
        bool, typer.Option("--job", help="Check the job that a launcher started: its workers and their nodes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine: versions, backends, cores, network namespaces, and what is missing."""
    if job:
        _job(as_json)
        return
    checks = [replace(c, remedy="") if c.ok else c for c in _checks()]
    usable = all(c.ok for c in checks if c.needed)
    if as_json:
        print_json({"usable": usable, "checks": [asdict(c) for c in checks]})
    else:
        _print(checks, usable)
    if not usable:
        raise typer.Exit(1)


def _job(as_json: bool) -> None:
    """Meet the other workers of the job; worker 0 prints what they see."""
    from gossamer.jobs.layout import inspect_job

    seen = inspect_job()
    if seen.rank == 0:
        if as_json:
            print_json(seen.to_dict())
        else:
            _print_job(seen)
    if seen.problems:
        raise typer.Exit(1)


def _print_job(seen: SeenJob) -> None:
    from rich.markup import escape

    rows = table("node", "name", "hosts", "workers")
    for at, node in enumerate(seen.nodes):
        rows.add_row(str(at), escape(node.name), escape(", ".join(node.hosts)), rank_ranges(node.ranks))
    shape = ",".join(str(len(node.ranks)) for node in seen.nodes)
    options = f"--per-node {shape}" if len(seen.nodes) > 1 else f"--n {seen.workers}"
    found = f"{count_of(seen.workers, 'worker')} on {count_of(len(seen.nodes), 'node')}, started by {seen.launcher}"
    print_rich(
        f"{found}; they met at {seen.met_at}",
        rows,
        *(f"problem: {escape(problem)}" for problem in seen.problems),
        f"next: gossamer topology list {options}",
    )


def _checks() -> Iterator[Check]:
    yield Check(
        "versions",
        "python",
        sys.version_info >= (3, 11),
        platform.python_version(),
        needed=True,
        remedy="install Python 3.11 or newer",
    )
    yield Check("versions", "gossamer", True, version("gossamer"), needed=True)
    for name in NEEDED + OPTIONAL:
        found = _version(name)
        ok = found is not None and (name != "torch" or _release(found) >= OLDEST_TORCH)
        remedy = f"pip install {INSTALLED_AS.get(name, name)}"
        absent = f"not installed; {USED_BY[name]}" if name in USED_BY else "not installed"
        yield Check("versions", name, ok, found or absent, name in NEEDED, remedy)
    yield from _torch_checks()
    yield from _machine_checks()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(written: str) -> tuple[int, ...]:
    major, minor = written.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _torch_checks() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from gossamer.comm.process_groups import available_backends

    for name, ok in available_backends().items():
        detail = "available" if ok else "not in this torch build"
        yield Check("backends", name, ok, detail, name == "gloo", f"install a torch build with {name}")
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    detail = f"{count} x {names}" if count else "no device: training runs on the CPU"
    yield Check("backends", "cuda", bool(count), detail)


def _machine_checks() -> Iterator[Check]:
    from gossamer.lab.namespaces import find_tool

    yield Check("machine", "cores", True, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    page, free, total = (os.sysconf(s) for s in ("SC_PAGE_SIZE", "SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    yield Check("machine", "memory", True, f"{page * free / 2**30:.1f} GiB free of {page * total / 2**30:.1f} GiB")
    missing = [tool for tool in ("ip", "tc") if find_tool(tool) is None]
    if missing:
        remedy = "install iproute2 (apt-get install iproute2)"
        yield Check("lab", "namespaces", False, f"{' and '.join(missing)} not found", remedy=remedy)
    elif os.geteuid() != 0:
        yield Check("lab", "namespaces", False, "needs root", remedy="run as root to use the lab's shaped links")
    else:
        yield from _lab_checks()


def _lab_checks() -> Iterator[Check]:
    """Make a real namespace and a shaped link, and remove them."""
    name = f"gossamer-doctor-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        problem = _run("ip", "netns", "add", name)
        if problem is None:
            stack.callback(_run, "ip", "netns", "delete", name)
        remedy = "run where network namespaces are allowed (for a container: --privileged)"
        yield Check("lab", "namespaces", problem is None, problem or "made and removed one", remedy=remedy)
        if problem is None:
            shape = ("root", "tbf", "rate", "50mbit", "burst", "32kbit", "latency", "50ms")
            problem = _run("tc", "-n", name, "qdisc", "add", "dev", "lo", *shape)
            remedy = "use a kernel with the sch_tbf module (modprobe sch_tbf)"
            yield Check("lab", "tc tbf", problem is None, problem or "shaped a link to 50 Mbit/s", remedy=remedy)


def _run(*command: str) -> str | None:
    """Run a command; returns None if it worked, else its error message."""
    from gossamer.lab.namespaces import find_tool

    program, *arguments = command
    try:
        done = subprocess.run([find_tool(program) or program, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().partition("\n")[0] or "failed")


def _print(checks: list[Check], usable: bool) -> None:
    from rich.markup import escape

    rows = table("", "what", "", "found", "how to get it")
    area = ""
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[red]missing[/]" if check.needed else "[yellow]no[/]"
        shown = check.area if check.area != area else ""
        rows.add_row(shown, check.name, mark, escape(check.detail), escape(check.remedy))
        area = check.area
    print_rich(
        rows, "Gossamer is usable here." if usable else "Gossamer is not usable here: see the rows marked missing."
    )
