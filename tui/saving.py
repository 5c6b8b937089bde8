"""Saving the screen to a file, as a picture or as text."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App

_FONTS = re.compile(r"\s*@font-face\s*\{[^}]*\}")
_ID = re.compile(r"terminal-\d+")


def screen_text(app: App[None]) -> str:
    """Return the characters on screen, without spaces at the ends of lines."""
    _, height = app.size
    lines = app.screen._compositor.render_strips()
    return "".join("".join(segment.text for segment in line).rstrip() + "\n" for line in lines[:height])


def screen_svg(app: App[None]) -> str:
    """Return the screen as SVG: the same bytes for the same screen, and no fonts from a network."""
    return _ID.sub("shardviz", _FONTS.sub("", app.export_screenshot(title="shardviz")))


def save_screen(app: App[None], kind: str) -> Path:
    """Write the screen to `shardviz-1.svg`, or to the next number that is free."""
    content = screen_svg(app) if kind == "svg" else screen_text(app)
    for number in count(1):
        path = Path(f"shardviz-{number}.{kind}")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            continue
        break
    return path
