"""What leaves the viewer: copied text, and pictures saved to new files in the working folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from textual.app import App


PATIENCE = 2.0
"""Seconds after which a copy command is given up."""


def copy(app: App[None], text: str) -> None:
    """Copy a text.

    The terminal is asked with OSC 52, which also works through ssh. tmux drops it by default, and the terminal of macOS
    does not know it: there a copy command runs too. If none of these works, the text is not copied.
    """
    app.copy_to_clipboard(text)
    for command in _commands():
        try:
            subprocess.run(
                command, input=text.encode(), timeout=PATIENCE, check=False, capture_output=True, close_fds=True
            )
        except (OSError, subprocess.TimeoutExpired):
            continue


def _commands() -> list[list[str]]:
    tmux = [["tmux", "load-buffer", "-w", "-"]] if os.environ.get("TMUX") else []
    return tmux + ([["pbcopy"]] if sys.platform == "darwin" else [])


_LINE = re.compile(r'<text class="[^"]*" x="([\d.]+)"[^>]*-line-(\d+)\)">(.*?)</text>', re.DOTALL)
"""A stretch of a line in rich's picture: where it begins, the number of the line, and its characters."""
COLUMN = 12.2
"""The width of a character there."""
_FONTS = re.compile(r"\s*@font-face\s*\{[^}]*\}")
_ID = re.compile(r"terminal-\d+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
MOST_STEM = 80
"""Characters of a file's name that come from a tensor's."""


def screen_text(app: App[None]) -> str:
    """Return the characters on screen, without spaces at the ends of lines."""
    return text_of(app.export_screenshot(simplify=True))


def text_of(picture: str) -> str:
    """Return the characters of a screen's picture, without spaces at the ends of lines."""
    lines: dict[int, str] = {}
    for x, number, text in _LINE.findall(picture):
        line = lines.get(int(number), "")
        gap = " " * (round(float(x) / COLUMN) - cell_len(line))  # rich leaves out stretches of spaces
        lines[int(number)] = line + gap + unescape(text).replace("\xa0", " ")
    return "".join(lines.get(number, "").rstrip() + "\n" for number in range(picture.count("<clipPath id=")))


def screen_svg(app: App[None]) -> str:
    """Return the screen as SVG: the same bytes for the same screen, and no fonts from a network."""
    return _ID.sub("shardviz", _FONTS.sub("", app.export_screenshot(title="shardviz")))


def save_screen(app: App[None], kind: str) -> Path:
    """Write the screen to `shardviz-1.svg`, or to the next number that is free."""
    return _save("shardviz", kind, screen_svg(app) if kind == "svg" else screen_text(app))


def save_picture(name: str, svg: str) -> Path:
    """Write a tensor's picture to `layers.0.weight-1.svg`, or to the next number that is free."""
    return _save(_NOT_IN_NAMES.sub("_", name).strip("._-")[:MOST_STEM] or "tensor", "svg", svg)


def _save(stem: str, kind: str, content: str) -> Path:
    for number in count(1):
        path = Path(f"{stem}-{number}.{kind}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            continue
        break
    return path
