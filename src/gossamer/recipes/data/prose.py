"""Running text for language models: files as they are, or the Python standard library's own source."""

import sysconfig
from pathlib import Path

from gossamer import InputError
from gossamer.recipes.data import files

# Large modules of one file each that every supported Python has.
_MODULES = (
    *("argparse", "ast", "codecs", "csv", "difflib", "doctest", "enum", "fractions", "functools", "inspect"),
    *("locale", "mailbox", "optparse", "os", "pickle", "random", "shutil", "statistics", "subprocess", "tarfile"),
    *("textwrap", "threading", "tokenize", "traceback", "turtle", "typing"),
)


def load(path: Path | None) -> tuple[str, list[str]]:
    """A name and the documents. A directory gives all its files, hidden ones left out, sorted by path."""
    if path is None:
        return "Python standard library", _standard_library()
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not found:
            raise InputError(f"{path} holds no files: name a text file or a directory with some")
    elif path.is_file():
        found = [path]
    else:
        raise InputError(f"{path} does not exist: name a text file or a directory with some")
    documents = [text for text in map(files.read_text, found) if text.strip()]
    if not documents:
        raise InputError(f"{path} holds no text: its {len(found)} file(s) are empty")
    return path.name, documents


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [root / f"{module}.py" for module in _MODULES]
    if missing := [path for path in found if not path.is_file()]:
        raise InputError(f"this Python has no source of its standard library ({missing[0]}): pass data")
    return [files.read_text(path) for path in found]
