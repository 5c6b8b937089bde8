"""Colors of ranks and verdicts, which are never the only sign, and filters for terminals that show less."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.theme import Theme

from shardviz.picture.model.palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HEAT_COLORS,
    HEAT_COLORS_16,
    HEAT_COLORS_256,
    INK_ON_16,
    INK_ON_HEAT_16,
    ORANGE,
    RANK_COLORS,
    RANK_COLORS_16,
    RANK_COLORS_256,
    SHADES,
    SKY,
    VERMILLION,
    WHITE,
    ink_on,
)
from shardviz.picture.text.terminal import ASCII, UNICODE, Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.verdicts import Verdict
    from shardviz.picture.text.paint import Tone


VERDICT_COLORS: dict[Verdict, str] = {
    "error": VERMILLION,
    "warning": ORANGE,
    "unknown": GREY,
    "good": GREEN,
    "pending": GREY,
}


ANSI = {
    **{0: "#000000", 2: "#00aa00", 3: "#aa5500", 4: "#0000aa", 5: "#aa00aa", 6: "#00aaaa"},
    **{10: "#55ff55", 11: "#ffff55", 14: "#55ffff", 15: "#ffffff"},
}
"""What Rich rounds to these of a terminal's 16 colors, and to no other; Textual would replace the numbers."""

RED_16 = "#aa0000"
"""The same for red; a tint of vermillion would be the background's color."""


@lru_cache(maxsize=256)
def block_style(tone: Tone, color: int, background: str, colors: str = "truecolor") -> Style:
    """Return the style of a block on a background, in a palette for so many colors as `Console.color_system` says."""
    if tone == "nobody":
        return _filled(RED_16, WHITE) if colors == "standard" else _tinted(VERMILLION, background, 0.25)
    if tone == "partly" or (tone == "elsewhere" and color < 0):
        share = 0.12 if tone == "partly" else 0.25
        return _filled(BLACK, "#ff5555") if colors == "standard" else _tinted(VERMILLION, background, share)
    if tone in ("in place", "unlit") or color < 0:
        return _tinted(GREY, background, 0.15 if tone in ("in place", "unlit") else 0.3)
    return rank_style(color, colors)


@lru_cache(maxsize=256)
def rank_style(color: int, colors: str = "truecolor") -> Style:
    """Return the style of a color of ranks: filled with it, and ink that can be read on it.

    Each palette has colors of the terminal's own, which are not rounded to others on their way there. Of 16, the
    second shade of each is the first one underlined.
    """
    if colors == "standard":
        hue, shade = divmod(color, SHADES)
        return _filled(ANSI[RANK_COLORS_16[hue]], ANSI[INK_ON_16[hue]]) + Style(underline=bool(shade))
    fill = (RANK_COLORS_256 if colors == "256" else RANK_COLORS)[color]
    return _filled(fill, ink_on(fill))


@lru_cache(maxsize=64)
def heat_style(level: int, colors: str = "truecolor") -> Style:
    """Return the style of a level of heat: filled with its color."""
    if level < 0:
        return Style()
    if colors == "standard":
        return _filled(ANSI[HEAT_COLORS_16[level]], ANSI[INK_ON_HEAT_16[level]])
    fill = (HEAT_COLORS_256 if colors == "256" else HEAT_COLORS)[level]
    return _filled(fill, ink_on(fill))


def _filled(fill: str, text: str) -> Style:
    return Style(color=Color.parse(text).rich_color, bgcolor=Color.parse(fill).rich_color)


def _tinted(color: str, background: str, share: float) -> Style:
    behind = Color.parse(background)
    fill = behind.blend(Color.parse(color), share)
    text = Color.parse("#ffffff") if fill.brightness < 0.5 else Color.parse("#000000")
    return Style(color=fill.blend(text, 0.9).rich_color, bgcolor=fill.rich_color)


def ink(color: str, *, bold: bool = False) -> Style:
    """Return the style of text in a color; under NO_COLOR without color, not in a gray of its brightness."""
    return Style(color=None if os.environ.get("NO_COLOR") else color, bold=bold)


ON_LIGHT = {GREEN: "#006b00", VERMILLION: "#a82000", ORANGE: "#7d5300"}
"""What can be read on a light background, at least 4.5 to 1, in place of the colors of verdicts.

Of 16 colors these are green, red and yellow; others of the same names are gray there.
"""


ON_DARK_16 = {GREEN: "#55ff55", VERMILLION: "#ff5555", ORANGE: "#ffff55"}
"""What Rich rounds to light green, red and yellow of 16 colors; vermillion would be yellow, as warnings are."""


class Inks(LineFilter):
    """Writes text in the colors of verdicts in others, if those cannot be read or told apart."""

    def __init__(self, inks: Mapping[str, str]) -> None:
        super().__init__()
        self._inks = inks
        self._changed = lru_cache(maxsize=1 << 10)(self._change)

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a line with other inks."""
        return [Segment(text, style and self._changed(style), control) for text, style, control in segments]

    def _change(self, style: Style) -> Style:
        ink_of = self._inks.get(style.color.get_truecolor().hex) if style.color is not None else None
        return style + Style(color=ink_of) if ink_of else style


class NoColors(Inks):
    """Writes text without colors, as NO_COLOR asks; what has a background of its own is reversed."""

    def _change(self, style: Style) -> Style:
        behind = Color.from_rich_color(style.bgcolor).brightness if style.bgcolor is not None else 0
        is_marked = FAINT < behind < 1 - FAINT or bool(style.reverse)
        return style.without_color + Style(reverse=is_marked, color="default", bgcolor="default")


FAINT = 0.2
"""A background so near to black or white is the screen's, and not that of a cursor or of a rank."""


def verdict_style(verdict: Verdict) -> Style:
    """Return the style of a verdict's glyph."""
    return ink(VERDICT_COLORS[verdict], bold=verdict in ("error", "warning"))


_DARK = Theme(
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
)
_LIGHT = replace(
    _DARK,
    name="shardviz-light",
    primary=BLUE,
    accent=BLUE,
    foreground="#262626",
    background="#fbfbf9",
    surface="#f3f3f0",
    panel="#e6e7e4",
    dark=False,
)
THEMES = (_DARK, _LIGHT)
"""shardviz's own themes; the viewer starts in the first."""


SAME = {
    **dict(zip(UNICODE.corners, ASCII.corners, strict=True)),
    **{getattr(UNICODE, name): getattr(ASCII, name) for name in ("good", "error", "pending", "times")},
    **dict(zip("≠●○▾▸→←↓↑·…⏎│╭╮╰╯━┃┏┓┗┛«»", "#*ov>><v^...|++++-|++++<>", strict=True)),
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
    **dict.fromkeys("▁▂▃▄▅▆▇▔▕", " "),
}
"""What is written for the characters that the viewer draws with; `≠` would be two in the tables of other commands."""


def shows_unicode() -> bool:
    """Whether the terminal shows more than ASCII, as the other commands find out."""
    stream = sys.__stdout__
    return stream is None or Terminal.of(stream).glyphs is UNICODE


@lru_cache(maxsize=1 << 12)
def plain(text: str) -> str:
    """Return a text in ASCII that takes as many columns."""
    return "".join(char if char.isascii() else SAME.get(char, "?" * cell_len(char)) for char in text)


class PlainCharacters(LineFilter):
    """Writes each character that is not ASCII as one that is."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a line in ASCII."""
        return [Segment(plain(text), style, control) for text, style, control in segments]
