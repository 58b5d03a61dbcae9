"""Reference pages that are written by the code itself: commands, errors and warnings, examples."""

from __future__ import annotations

from pathlib import Path

from website import commands, messages

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}


def pages() -> dict[str, str]:
    """Return the generated pages by their place on the site."""
    return {
        "reference/commands.md": commands.page(),
        "reference/errors.md": messages.page(),
        "reference/examples.md": examples(),
        "reference/launch-files.md": launch_files(),
    }


def anchor(path: Path) -> str:
    """Return the anchor of a file on the page that shows it."""
    return path.name.lower().replace(".", "-")


def examples() -> str:
    """Return every example with its description and its code."""
    head = "# Examples\n\nComplete programs, in the folder `examples/` of the repository. The tests run each of them."
    return "\n\n".join([head, *map(_shown, sorted((ROOT / "examples").glob("*.py")))]) + "\n"


def launch_files() -> str:
    """Return the page about the launch files with the files themselves."""
    folder = ROOT / "examples" / "launch"
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return "\n\n".join([(folder / "README.md").read_text(encoding="utf-8"), *map(_shown, files)]) + "\n"


def _shown(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f"## {path.name} {{ #{anchor(path)} }}\n\n```{language}\n{path.read_text(encoding='utf-8')}```"
