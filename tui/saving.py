"""Saving to a new file in the working folder: the screen as a picture or as text, and the picture of one tensor."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App

_FONTS = re.compile(r"\s*@font-face\s*\{[^}]*\}")
_ID = re.compile(r"terminal-\d+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
MOST_STEM = 80
"""Characters of a file's name that come from a tensor's."""


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
