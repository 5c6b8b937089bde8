"""A real browser without a window, for the tests of the page: what it makes of a file, and what that looks like."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from html import unescape
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = "no browser"
HOW_TO_GET_A_BROWSER = f"They need one of {', '.join(BROWSERS)} on the PATH: apt-get install chromium"
TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


@cache
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"{NO_BROWSER}. {HOW_TO_GET_A_BROWSER}")
    return found


@cache
def profile() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a browser's settings, which takes it a quarter of its time to make."""
    return tempfile.TemporaryDirectory(prefix="shardviz-browser-", ignore_cleanup_errors=True)


def run(file: Path, *flags: str) -> str:
    command = [
        *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *(f"--user-data-dir={profile().name}", "--hide-scrollbars", "--window-size=1200,1600", *flags),
        file.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def dom(file: Path, *flags: str) -> str:
    """Return the page as the browser has it."""
    return run(file, "--dump-dom", *flags)


def asked(tmp_path: Path, file: Path, question: str, *flags: str) -> str:
    """Return what an expression of JavaScript says of the page, which itself forbids scripts."""
    page = file.read_text(encoding="utf-8")
    policy = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(page)
    script = f"<script>document.title = {question}</script></body>"
    copy = tmp_path / "asked.html"
    copy.write_text(policy.sub("", page).replace("</body>", script), encoding="utf-8")
    found = TITLE.search(dom(copy, *flags))
    assert found is not None
    assert not found[1].startswith("shardviz"), "the question did not run"
    return unescape(found[1])


def picture(tmp_path: Path, file: Path, *flags: str) -> bytes:
    """Return the page as PNG."""
    shot = tmp_path / "shot.png"
    run(file, f"--screenshot={shot}", *flags)
    return shot.read_bytes()
