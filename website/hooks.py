"""Hooks of mkdocs: generated pages, local scripts, and links that work on the site and in the repository.

Pages in `docs/` link to other files of the repository (records, examples, CONTRIBUTING.md) by relative paths. On the
site such a link leads to the page that was made of the file; if there is none, only the link's text remains.
"""

from __future__ import annotations

import gzip
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from website import generate, records  # noqa: E402  found by the line above

PROJECT = ("ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
TABLE = re.compile(r"(^[^|\n].*\n)(\|.*\n\|\s*:?-)", re.M)  # a table that follows a line of text
SCRIPTS = {'class="mermaid"': "mermaid.tiny.js", 'class="arithmatex"': "mathjax-tex-svg.js"}
MATHJAX = "window.MathJax = {tex: {inlineMath: [['\\\\(', '\\\\)']], displayMath: [['\\\\[', '\\\\]']]}}"


class Site:
    """Which page of the site belongs to which file of the repository."""

    def __init__(self, config: MkDocsConfig) -> None:
        self.config = config
        self.page_of: dict[str, str] = {"README.md": "index.md"}
        self.origin_of: dict[str, str] = {}
        self.new: list[File] = []

    def add(self, page: str, origin: str, text: str | None = None) -> None:
        """Show a file of the repository as `page`; with `text` the page is generated."""
        self.page_of[origin] = page
        self.origin_of.setdefault(page, origin)
        if text is None:
            self.new.append(File.generated(self.config, page, abs_src_path=str(ROOT / origin)))
        else:
            self.new.append(File.generated(self.config, page, content=text))

    def script(self, name: str, content: bytes) -> None:
        """Add a script or style that is not a page."""
        self.new.append(File.generated(self.config, f"vendor/{name}", content=content))


site: Site


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the records in the navigation."""
    evidence = next(section["Evidence"] for section in config.nav if "Evidence" in section)
    evidence.extend({kind: [f"evidence/{name}.md" for name in mine]} for kind, mine in records.by_kind().items())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages and local scripts to the pages of `docs/`."""
    global site
    site = Site(config)
    for file in files:
        site.page_of[f"docs/{file.src_uri}"] = file.src_uri
        site.origin_of[file.src_uri] = f"docs/{file.src_uri}"
    for name in PROJECT:
        site.add(f"project/{name.lower()}", name)
    site.origin_of["reference/launch-files.md"] = "examples/launch/README.md"
    for page, text in generate.pages().items():
        site.add(page, f"docs/{page}", text)
    for folder, page in {"examples": "reference/examples.md", "examples/launch": "reference/launch-files.md"}.items():
        for path in sorted((ROOT / folder).iterdir()):
            site.page_of[f"{folder}/{path.name}"] = f"{page}#{generate.anchor(path)}"
        site.page_of[folder] = site.page_of[f"{folder}/README.md"] = page
    site.add("evidence/index.md", "benchmarks/records/README.md", records.index())
    for name in records.names():
        folder = f"benchmarks/records/{name}"
        site.add(f"evidence/{name}.md", f"{folder}/README.md", records.page(name))
        site.page_of[folder] = f"evidence/{name}.md"
        for path in records.attachments(name):
            site.add(f"evidence/{name}/{path}", f"{folder}/{path}")
    for path in sorted((ROOT / "website" / "vendor").iterdir()):
        if path.suffix == ".gz":
            site.script(path.stem, gzip.decompress(path.read_bytes()))
        elif path.suffix == ".js":
            site.script(path.name, path.read_bytes())
    site.script("site.css", (ROOT / "website" / "site.css").read_bytes())
    for file in site.new:
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    start = posixpath.dirname(site.origin_of[here])

    def follow(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path or link.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(start, path))
        known = site.page_of.get(target)
        if known is None:
            return match[0] if target.startswith("docs/") else text  # mkdocs reports what is missing in docs/
        known, _, own = known.partition("#")
        to = posixpath.relpath(known, posixpath.dirname(here) or ".")
        hash_ = "#" if own else hash_
        return f"{image}[{text}]({to}{hash_}{own or anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.S | re.M)  # every second part is code
    return "".join(part if i % 2 else TABLE.sub(r"\1\n\2", LINK.sub(follow, part)) for i, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the diagram and equation scripts on pages that need them."""
    up = posixpath.relpath(".", posixpath.dirname(page.url) or ".")
    needed = [name for sign, name in SCRIPTS.items() if sign in output]
    tags = "".join(f'<script src="{up}/vendor/{name}"></script>' for name in needed)
    if "mathjax-tex-svg.js" in needed:
        tags = f"<script>{MATHJAX}</script>{tags}"
    return output.replace("</body>", f"{tags}</body>")


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Name what the build does without: nothing is fetched from elsewhere."""
    remote = [path for path in (*config.extra_javascript, *config.extra_css) if "://" in str(path)]
    if remote:
        raise ValueError(f"the site must work without a network, got {remote}")
    return env
