"""What leaves the viewer: copied text, pictures saved in the working folder, and the theme for the next session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
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
    commands = [["tmux", "load-buffer", "-w", "-"]] if os.environ.get("TMUX") else []
    commands += [["pbcopy"]] if sys.platform == "darwin" else []
    for command in commands:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                command, input=text.encode(), timeout=PATIENCE, check=False, capture_output=True, close_fds=True
            )


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


def save(name: str, kind: str, content: str) -> Path:
    """Write a picture to `layers.0.weight-1.svg`, or to the next number that is free."""
    stem = _NOT_IN_NAMES.sub("_", name).strip("._-")[:MOST_STEM] or "tensor"
    for number in count(1):
        path = Path(f"{stem}-{number}.{kind}")
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(content)
            break
    return path


def _settings() -> Path:
    """Return the file of settings, where programs of this system keep theirs."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".config") / "shardviz" / "viewer.json"


def remembered_theme() -> str:
    """Return the theme that the user chose last; empty if none was, or the file of settings is damaged."""
    try:
        theme = json.loads(_settings().read_text(encoding="utf-8"))["theme"]
    except (OSError, ValueError, RuntimeError, LookupError, TypeError):
        return ""
    return theme if isinstance(theme, str) else ""


def remember_theme(theme: str) -> None:
    """Keep a theme for the next session; if nothing can be written, it is forgotten."""
    with suppress(OSError, RuntimeError):
        _settings().parent.mkdir(parents=True, exist_ok=True)
        _settings().write_text(json.dumps({"theme": theme}), encoding="utf-8")
