"""Native kernels: C files that are compiled once per user, loaded on first use, and optional.

Note [When native kernels run]
    Nothing is compiled at import. The first use in a process looks for the library in `$XDG_CACHE_HOME/gossamer`
    (~/.cache/gossamer) and builds it if it is missing, which takes about a second and needs a C compiler (`$CC`, or
    cc). Without one, and with the environment variable GOSSAMER_NATIVE=0, torch operations compute the same, only more
    slowly.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path

# No errno and no trapping, so that square roots and comparisons become vector instructions; NaN and infinities
# keep their meaning. `-march=native` makes the library one of this processor only: the cache key contains it.
FLAGS = ["-O3", "-march=native", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread"]
BUILD_SECONDS = 60

log = logging.getLogger(__name__)


def load(source: Path) -> ctypes.CDLL | None:
    """The library of a C file, built if need be; None if kernels are turned off or cannot be built here."""
    if os.environ.get("GOSSAMER_NATIVE", "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(library(source)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.debug("the native kernels of %s are not available, torch operations step in: %s", source.name, error)
        return None


def library(source: Path) -> Path:
    """The compiled library of a C file."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=BUILD_SECONDS, check=True).stdout
    identity = [source.read_bytes(), " ".join([*compiler, *FLAGS]).encode(), version, _processor()]
    key = hashlib.sha256(b"\0".join(identity)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_foreign(folder)
    built = folder / f"{source.parent.name}-{key}.so"
    if not built.exists():
        # Workers may build at the same time: each builds a file of its own, and the last rename wins.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / "kernels.so"
            command = [*compiler, *FLAGS, str(source), "-o", str(fresh), "-lm"]
            subprocess.run(command, capture_output=True, timeout=BUILD_SECONDS, check=True)
            fresh.replace(built)
    return built


def _refuse_foreign(folder: Path) -> None:
    """Code is loaded from this folder, so nobody else may write to it."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} can be written by other users")


def _processor() -> bytes:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    lines = [platform.machine()]
    if Path("/proc/cpuinfo").exists():
        wanted = ("vendor_id", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
            if line.startswith(wanted):
                lines.append(line)
    return "\n".join(lines).encode()
