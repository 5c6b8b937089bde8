"""The width, characters and colors of the terminal, pipe or file that text goes to; lines and columns of text."""

from __future__ import annotations

import io
import os
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from shardviz.picture.model.palette import (
    GREEN,
    HEAT_COLORS,
    HEAT_COLORS_16,
    HEAT_COLORS_256,
    HEAT_SIGNS,
    INK_ON_16,
    INK_ON_HEAT_16,
    ORANGE,
    RANK_COLORS,
    RANK_COLORS_16,
    RANK_COLORS_256,
    RIGHT,
    SHADES,
    VERMILLION,
    WRONG,
    ink_on,
)
from shardviz.text import INSIDE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardviz.check.verdicts import Verdict

PIPE_WIDTH = 100
"""Columns of text that goes to a pipe or a file."""

MIN_WIDTH = 40
GOOD = GREEN
BAD = f"bold {VERMILLION}"
WARNING = ORANGE
DIM = "dim"


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs that text uses; each verdict's glyph has the verdict's name.

    Attributes:
        good: Before a tensor in order.
        error: Before an error.
        warning: Before a warning.
        unknown: Before a tensor that was not checked.
        pending: Before a tensor that is being checked.
        differs: Between two things that were compared.
        wrong: Before a block that is not held by the ranks that claim it, a rank of a finding, and a wrong value.
        more: In place of parts that are not shown one by one.
        times: Between sizes.
        absent: In place of a side of a call that was not followed.
        corners: Box drawing by which arms a corner has: up 1, down 2, left 4, right 8.
    """

    good: str = RIGHT
    error: str = WRONG
    warning: str = "!"
    unknown: str = "?"
    pending: str = "◌"
    differs: str = "≠"
    wrong: str = WRONG
    more: str = "…"
    times: str = "×"
    absent: str = "·"
    corners: str = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"

    def of(self, verdict: Verdict) -> str:
        """Return a verdict's glyph, so that color is never the only sign of it."""
        glyph: str = getattr(self, verdict)
        return glyph


UNICODE = Glyphs()
ASCII = Glyphs("+", "x", "!", "?", ".", "!=", "x", "..", "x", "-", " |||-+++-+++-+++")
_IN_ASCII = str.maketrans({"…": "..", WRONG: "x", INSIDE: ">", **dict(zip(HEAT_SIGNS, "12345678", strict=True))})


@dataclass(frozen=True, slots=True)
class Terminal:
    """The width, characters and colors of the text's destination.

    Attributes:
        glyphs: The characters that it can show.
        color: Whether styles are written.
    """

    width: int = PIPE_WIDTH
    glyphs: Glyphs = UNICODE
    color: bool = False

    @classmethod
    def of(cls, stream: IO[str], color: str = "auto") -> Terminal:
        """Look at a stream.

        Args:
            stream: Standard output, or a file.
            color: `always`, `never`, or `auto`: on a terminal, unless `NO_COLOR` is set.
        """
        at_terminal = stream.isatty()
        columns = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns or PIPE_WIDTH  # 0 if Python 3.10 is not told
        width = max(columns, MIN_WIDTH) if at_terminal else _pipe_width()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        wanted = color == "always" or (color == "auto" and at_terminal and not plain)
        return cls(width, UNICODE if _takes_unicode(stream) else ASCII, wanted)

    def render(self, lines: Iterable[Text]) -> str:
        """Return lines as the characters to write, each ended by a newline."""
        if not self.color:
            return self.spelled("".join(f"{line.plain.rstrip()}\n" for line in lines))
        file = io.StringIO()
        console = Console(
            file=file, force_terminal=True, color_system="auto", no_color=False, markup=False, highlight=False
        )
        console.push_theme(_theme(console.color_system))
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=True)
        return self.spelled(file.getvalue())

    def spelled(self, text: str) -> str:
        """Replace the signs of pictures by ASCII if the terminal lacks them; names stay as they are.

        All output passes through this last. Text in columns passes earlier, because `..` is wider.
        """
        return text.translate(_IN_ASCII) if self.glyphs == ASCII else text

    def write(self, stream: IO[str], lines: Iterable[Text]) -> None:
        """Write lines; characters that the stream cannot encode are escaped."""
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(self.render(lines).encode(encoding, "backslashreplace").decode(encoding))


def line(*parts: str | tuple[str, str] | Text) -> Text:
    """Return a line of parts, plain or `(text, style)`; nothing in them is read as markup."""
    return Text.assemble(*parts, no_wrap=True, end="")


_WHOLE = re.compile(r"\(?(?:_?[A-Za-z]*(?:Shard|Replicate|Partial)\([^()]*\)(?:, )?)+\)?|\[[^\[\]]{1,60}\]")
"""Placements and layouts: they are copied, so no line breaks inside."""


def wrapped(text: str, width: int, first: Text, indent: int) -> list[Text]:
    """Break a sentence into lines after `first`, indented; layouts and long words stay whole."""
    glued = _WHOLE.sub(lambda match: match[0].replace(" ", "\xa0"), text)
    lines, current, is_new = [], first, True
    for glued_word in filter(None, glued.split(" ")):
        word = glued_word.replace("\xa0", " ")
        if not is_new and current.cell_len + 1 + cell_len(word) > width:
            lines.append(current)
            current, is_new = line(" " * indent), True
        current, is_new = line(current, "" if is_new else " ", word), False
    return [*lines, current]


def side_by_side(columns: Iterable[list[Text]], gap: int = 4) -> list[Text]:
    """Lay blocks of lines next to each other."""
    blocks = [block for block in columns if block]
    widths = [max(row.cell_len for row in block) for block in blocks]
    lines = []
    for at in range(max(map(len, blocks), default=0)):
        row = Text(end="")
        for block, width in zip(blocks, widths, strict=True):
            part = block[at] if at < len(block) else Text()
            row = line(row, part, " " * (width - part.cell_len + gap))
        lines.append(row)
    return lines


@lru_cache(maxsize=4)
def _theme(color_system: str | None) -> Theme:
    """Return the styles of ranks and heat for a color system, with readable ink on each fill."""
    if color_system == "standard":
        hues, heat = _ansi(INK_ON_16, RANK_COLORS_16), _ansi(INK_ON_HEAT_16, HEAT_COLORS_16)
        ranks = [hue + Style(underline=bool(shade)) for hue in hues for shade in range(SHADES)]
        plain = {BAD: "bold red", WARNING: "yellow", GOOD: "green"}
    else:
        is_256, plain = color_system == "256", {}
        ranks = _filled(RANK_COLORS_256 if is_256 else RANK_COLORS)
        heat = _filled(HEAT_COLORS_256 if is_256 else HEAT_COLORS)
    lines = [Style(color=style.bgcolor) for style in ranks]
    families = (("rank", ranks), ("heat", heat), ("line", lines))
    named = {f"{name}.{at}": style for name, own in families for at, style in enumerate(own)}
    return Theme({**named, **plain}, inherit=False)


def _filled(colors: Sequence[str]) -> list[Style]:
    return [Style(color=ink_on(color), bgcolor=color) for color in colors]


def _ansi(inks: Sequence[int], fills: Sequence[int]) -> list[Style]:
    return [Style.parse(f"color({ink}) on color({fill})") for ink, fill in zip(inks, fills, strict=True)]


def _pipe_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), MIN_WIDTH) if columns.isdigit() else PIPE_WIDTH


def _takes_unicode(stream: IO[str]) -> bool:
    signs = "".join([UNICODE.good, UNICODE.error, UNICODE.differs, UNICODE.more, UNICODE.corners])
    try:
        signs.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill text up to a width with spaces: behind it, or before it if it is set flush right."""
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def widest(texts: Iterable[str]) -> int:
    """Return the columns that the widest of some texts takes; 0 without any."""
    return max(map(cell_len, texts), default=0)


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return each row as one string, its cells below those of the other rows.

    Args:
        rows: Each with the same number of cells.
        left: How many of the first columns are set flush left; the others are flush right.
    """
    widths = [(at >= left, widest(column)) for at, column in enumerate(zip(*rows, strict=True))]
    return [
        "  ".join(pad(cell, width, right=right) for cell, (right, width) in zip(row, widths, strict=True))
        for row in rows
    ]


def table(rows: Sequence[Sequence[str]], left: int = 1, headings: int = 1) -> list[Text]:
    """Return rows of cells as lines, with dim headings. The arguments are those of `align`."""
    found = align(rows, left)
    return [*(line((heading, DIM)) for heading in found[:headings]), *map(line, found[headings:])]
