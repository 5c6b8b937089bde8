"""The screen in ASCII, where the terminal shows nothing else: one character for each, so that all keeps its place."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.segment import Segment
from textual.filter import LineFilter

from shardviz.picture.text.terminal import ASCII, UNICODE, Terminal

if TYPE_CHECKING:
    from textual.color import Color

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
    return text if text.isascii() else "".join(map(_plain, text))


def _plain(char: str) -> str:
    return char if char.isascii() else SAME.get(char, "?" * cell_len(char))


class PlainCharacters(LineFilter):
    """Writes each character that is not ASCII as one that is."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a line in ASCII."""
        return [Segment(plain(text), style, control) for text, style, control in segments]
