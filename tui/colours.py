"""Okabe and Ito's colours, toned to the theme: a rank always has the same one, and no colour is the only sign."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

if TYPE_CHECKING:
    from shardviz.picture.paint import Look

    from .document import Verdict

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
RANK_COLOURS = (SKY, ORANGE, GREEN, PURPLE, BLUE, YELLOW, GREY)
"""Vermillion is left out: it says that something is wrong."""

VERDICT_COLOURS: dict[Verdict, str] = {
    "error": VERMILLION,
    "warning": ORANGE,
    "unchecked": GREY,
    "clean": GREEN,
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
    return _filled(RANK_COLOURS[look.rank % len(RANK_COLOURS)], background, 0.25 if look.tone == "mixed" else 0.45)


@lru_cache(maxsize=1024)
def rank_style(rank: int, background: str, share: float = 0.45) -> Style:
    """Return the style of a rank's place on a background, with a share of its own colour."""
    return _filled(RANK_COLOURS[rank % len(RANK_COLOURS)], background, share)


def _filled(colour: str, background: str, share: float) -> Style:
    behind = Color.parse(background)
    fill = behind.blend(Color.parse(colour), share)
    text = Color.parse("#ffffff") if fill.brightness < 0.5 else Color.parse("#000000")
    return Style(color=fill.blend(text, 0.9).rich_color, bgcolor=fill.rich_color)


def ink(colour: str, *, bold: bool = False) -> Style:
    """Return the style of text in a colour; under NO_COLOR in none, not in a grey of its brightness."""
    return Style(color=None if os.environ.get("NO_COLOR") else colour, bold=bold)


def verdict_style(verdict: Verdict) -> Style:
    """Return the style of a verdict's glyph."""
    return ink(VERDICT_COLOURS[verdict], bold=verdict in ("error", "warning"))


THEMES = (
    Theme(
        "shardviz-dark",
        primary=SKY,
        accent=SKY,
        success=GREEN,
        warning=ORANGE,
        error=VERMILLION,
        foreground="#d8dee6",
        background="#11151a",
        surface="#171c23",
        panel="#1f262f",
    ),
    Theme(
        "shardviz-light",
        primary=BLUE,
        accent=BLUE,
        success=GREEN,
        warning=ORANGE,
        error=VERMILLION,
        foreground="#1d2430",
        background="#fbfbf9",
        surface="#f3f3f0",
        panel="#e6e7e4",
        dark=False,
    ),
)
"""shardviz's own themes, the one it starts in first."""
