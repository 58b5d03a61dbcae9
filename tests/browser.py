"""A headless browser without a network, for pages that must work offline."""

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")


def shown(page: Path, profile: Path) -> str:
    """Return the page as HTML after its scripts have run."""
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=8000",
        "--dump-dom",
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300).stdout


needs_playwright = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs a Chromium browser and the package playwright",
)


@contextmanager
def driven(width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Any]:
    """Yield a page to drive; leaving the block fails on errors of scripts and on requests beyond this machine."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            scheme = "dark" if dark else "light"
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("requestfailed", lambda request: problems.append(f"{request.url} {request.failure}"))
            yield page
        finally:
            browser.close()
    problems = [problem for problem in problems if not problem.endswith("ERR_ABORTED")]  # left before it was loaded
    assert problems == [], problems
