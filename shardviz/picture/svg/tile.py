"""Elements of SVG pictures: labeled boxes, exhibit tables, and the style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.exhibits.exhibit import columns_of
from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import HEAT_COLORS, RANK_COLORS, ink_on
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.picture.exhibits.exhibit import Exhibit

CHAR = 7.3
"""Pixels of a character at the size that boxes are labeled in."""

MOST_CLASSES = 8
"""Ranks that the element of a box names at most; a page lights up everything that these ranks hold."""

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

ROW = 18
COLUMN_GAP = 16


@dataclass(frozen=True, slots=True)
class SvgFragment:
    """A part of an SVG picture with its size.

    Attributes:
        markup: Its elements, with their top left corner at 0, 0.
        width: Pixels.
        height: Pixels.
    """

    markup: str
    width: int
    height: int

    def moved(self, left: int, top: int) -> str:
        """Return its elements with their top left corner at a place."""
        return element("g", self.markup, transform=f"translate({left} {top})")


@dataclass(frozen=True, slots=True)
class PixelBox:
    """The pixels of a box, including the gap around it."""

    left: int
    top: int
    width: int
    height: int


def canvas(label: str, width: int, height: int, *content: str, is_alone: bool = True) -> str:
    """Write an `svg` element.

    Args:
        label: What it shows, for screen readers.
        width: Its pixels to the right.
        height: Its pixels downwards.
        content: What is in it.
        is_alone: Whether it may be a file of its own, and not only a part of a page.
    """
    return element(
        "svg",
        *content,
        xmlns="http://www.w3.org/2000/svg" if is_alone else None,
        class_="sv",
        role="img",
        aria_label=label,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )


def tile(place: PixelBox, label: str, tooltip: str, *, color: object, ranks: Sequence[int], differs: bool) -> str:
    """Draw a box.

    Args:
        place: Where it is.
        label: What is written in it, with the sign of what is wrong where it differs.
        tooltip: What is shown when the mouse is over it.
        color: The name of its color in the style sheet.
        ranks: The ranks that it is about.
        differs: Whether it is marked as not as claimed.
    """
    box = {"x": place.left + 1, "y": place.top + 1, "width": place.width - 2, "height": place.height - 2, "rx": 2}
    return element(
        "g",
        element("title", words(tooltip)),
        element("rect", **box, class_=f"sv-b sv-f{color}"),
        element("rect", **box, class_="sv-hatch") if differs else "",
        element(
            "text",
            words(label),
            x=place.left + place.width // 2,
            y=place.top + place.height // 2 + 4,
            class_=f"sv-l sv-t{color}" + (" sv-d" if differs else ""),
        ),
        class_=classes_of(ranks),
    )


def classes_of(ranks: Sequence[int]) -> str | None:
    """Return the classes that name a box's ranks; None if they are too many."""
    return " ".join(f"sv-r{rank}" for rank in ranks) or None if len(ranks) <= MOST_CLASSES else None


def _colored(ink: str, soft: str, paper: str, mixed: str, bad: str, good: str) -> str:
    """Return the rules with colors; converters outside browsers don't know CSS variables."""
    return (
        f".sv text{{fill:{ink}}}.sv .sv-paper{{fill:{paper}}}.sv .sv-soft,.sv .sv-i{{fill:{soft}}}"
        f".sv .sv-bad{{fill:{bad}}}.sv .sv-good{{fill:{good}}}.sv .sv-fmixed{{fill:{mixed}}}"
        f".sv .sv-fnobody{{stroke:{soft}}}.sv .sv-hatch{{stroke:{ink}}}"
    )


STYLE = (
    f".sv{{font:12px {FONT}}}.sv text{{white-space:pre}}"
    ".sv .sv-name{font-size:16px}.sv .sv-name,.sv .sv-h,.sv .sv-bad,.sv .sv-good,.sv .sv-d{font-weight:700}"
    ".sv .sv-said{font-weight:400}"
    ".sv .sv-i,.sv .sv-l{text-anchor:middle}.sv .sv-l{font-size:13px}"
    ".sv .sv-start{text-anchor:start}.sv .sv-end{text-anchor:end}"
    ".sv .sv-fnobody{fill:none;stroke-dasharray:3 3}"
    ".sv .sv-hatch{fill:url(#sv-differs);stroke-width:2;pointer-events:none}"
    ".sv .sv-band{opacity:.5}.sv .sv-still{opacity:.18}"
    + _colored("#1b1f24", "#57606a", "#fff", "#d0d7de", "#a83f00", "#00694d")
    + "@media screen and (prefers-color-scheme:dark){"
    + _colored("#e6edf3", "#9da7b1", "#0d1117", "#4a525b", "#ff8b4d", "#3ddbac")
    + ".sv .sv-band{opacity:.75;stroke:#9da7b1}.sv .sv-still{opacity:.4}}"
    + "".join(
        f".sv .sv-f{at}{{fill:{color}}}.sv .sv-t{at}{{fill:{ink_on(color)}}}"
        for at, color in (*enumerate(RANK_COLORS), *((f"h{at}", color) for at, color in enumerate(HEAT_COLORS)))
    )
)

PATTERN = (
    '<defs><pattern id="sv-differs" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V7" stroke="#000" stroke-opacity=".16" stroke-width="3"/>'
    '<path d="M3.5 0V7" stroke="#fff" stroke-opacity=".22" stroke-width="3"/></pattern></defs>'
)


def exhibit_drawing(exhibit: Exhibit) -> SvgFragment:
    """Draw an exhibit with its caption above."""
    columns = columns_of(exhibit)
    lines = [[(text, "sv-soft") for text in (exhibit.heads[0], *(column[0] for column in columns))]]
    for at, row in enumerate(exhibit.rows, 1):
        styles = ["sv-bad" if cell.is_wrong else "sv-good" if cell.is_right else "sv-c" for cell in row.cells]
        cells = zip((column[at] for column in columns), styles, strict=False)
        lines += [[]] if row.is_apart and at > 1 else []
        lines.append([(printable(row.title), "sv-soft"), *cells])
    if exhibit.left_out:
        lines.insert(len(lines) - exhibit.sums_up, [(f"{UNICODE.more} {exhibit.more}", "sv-soft")])
    widths = [max(cell_len(text) for text, _ in column) for column in zip_longest(*lines, fillvalue=("", ""))]
    lefts = list(accumulate((round(width * CHAR) + COLUMN_GAP for width in widths), initial=0))
    markup = element("text", words(exhibit.caption), x=0, y=14, class_="sv-h")
    for at, line in enumerate(lines, 1):
        for left, (text, style) in zip(lefts, line, strict=False):
            markup += element("text", words(text), x=left, y=14 + at * ROW, class_=style) if text else ""
    height = ROW * (len(lines) + 1)
    return SvgFragment(markup, max(lefts[-1] - COLUMN_GAP, round(cell_len(exhibit.caption) * CHAR)), height)
