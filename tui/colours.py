"""The colours of ranks and of verdicts, blended into the theme; colour is never the only sign."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

from shardviz.picture.model.palette import BLUE, GREEN, GREY, ORANGE, RANK_COLOURS, SKY, VERMILLION

if TYPE_CHECKING:
    from shardviz.check.verdicts import Verdict
    from shardviz.picture.text.paint import Look

VERDICT_COLOURS: dict[Verdict, str] = {
    "error": VERMILLION,
    "warning": ORANGE,
    "unknown": GREY,
    "good": GREEN,
    "pending": GREY,
}


@lru_cache(maxsize=1024)
def block_style(look: Look, background: str) -> Style:
    """Return the style of a block on a background."""
    if look.tone == "nobody":
        return _filled(VERMILLION, background, 0.25)
    if look.tone == "elsewhere":
        return _filled(VERMILLION, background, 0.6 if look.rank % 2 else 0.45) + Style(bold=True)
    if look.tone in ("in place", "unlit"):
        return _filled(GREY, background, 0.15)
    return rank_style(look.colour, background, 0.25 if look.tone == "mixed" else 0.45)


@lru_cache(maxsize=1024)
def rank_style(colour: int, background: str, share: float = 0.45) -> Style:
    """Return the style of a rank on a background, with a share of its colour in the palette of ranks."""
    return _filled(RANK_COLOURS[colour], background, share)


def _filled(colour: str, background: str, share: float) -> Style:
    behind = Color.parse(background)
    fill = behind.blend(Color.parse(colour), share)
    text = Color.parse("#ffffff") if fill.brightness < 0.5 else Color.parse("#000000")
    return Style(color=fill.blend(text, 0.9).rich_color, bgcolor=fill.rich_color)


def ink(colour: str, *, bold: bool = False) -> Style:
    """Return the style of text in a colour; under NO_COLOR without colour, not in a grey of its brightness."""
    return Style(color=None if os.environ.get("NO_COLOR") else colour, bold=bold)


def verdict_style(verdict: Verdict) -> Style:
    """Return the style of a verdict's glyph."""
    return ink(VERDICT_COLOURS[verdict], bold=verdict in ("error", "warning"))


def _theme(name: str, accent: str, foreground: str, behind: tuple[str, str, str], *, dark: bool) -> Theme:
    """Make a theme; `behind` are the colours of the background, the surface and the panels."""
    background, surface, panel = behind
    return Theme(
        name,
        primary=accent,
        accent=accent,
        success=GREEN,
        warning=ORANGE,
        error=VERMILLION,
        foreground=foreground,
        background=background,
        surface=surface,
        panel=panel,
        dark=dark,
    )


THEMES = (
    _theme("shardviz-dark", SKY, "#d8dee6", ("#11151a", "#171c23", "#1f262f"), dark=True),
    _theme("shardviz-light", BLUE, "#1d2430", ("#fbfbf9", "#f3f3f0", "#e6e7e4"), dark=False),
)
"""shardviz's own themes; the viewer starts in the first."""
