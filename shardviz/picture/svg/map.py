"""Elements of SVG pictures: labeled boxes, exhibit tables, the style sheet, and one panel of a drawing, to scale.

Pixels are whole numbers, so that the bytes are stable.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.exhibits.exhibit import columns_of
from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import column_titles, pieces, row_stretches
from shardviz.picture.model.holders import rank_array, ranks_of, ranks_text
from shardviz.picture.model.mesh import block_label
from shardviz.picture.model.palette import HEAT_COLORS, RANK_COLORS, WRONG, ink_on
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import cut_at_comma, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.picture.exhibits.exhibit import Exhibit
    from shardviz.picture.model.drawing import Block, Grid, Panel, Span, Stretch
    from shardviz.picture.model.palette import Coloring

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
        label: What is written in it, with the sign of what is wrong where it differs.
        tooltip: What is shown when the mouse is over it.
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


BOX_HEIGHT = 18
BOX_WIDTH = 44
TITLE_HEIGHT = 20
MAP_HEIGHT = 336
NARROW = 176
WIDE = 400

BAND = 96
"""Pixels between the sides where bands run."""

GAP = 28


@dataclass(frozen=True, slots=True)
class Scale:
    """The pixels of a panel's boxes, shared by both sides.

    Attributes:
        tops: Pixels of the edges of the rows, one more than there are rows.
        lefts: Pixels of the edges of the columns.
    """

    tops: tuple[int, ...]
    lefts: tuple[int, ...]

    @property
    def width(self) -> int:
        """Pixels of one side without its titles."""
        return self.lefts[-1]

    @property
    def height(self) -> int:
        """Pixels of one side without its titles."""
        return self.tops[-1]


@dataclass(frozen=True, slots=True)
class Box:
    """Neighboring blocks with equal ranks and an equal mark, drawn as one.

    Attributes:
        rows: The first row and one past the last.
        cols: The first column and one past the last.
        block: Their ranks.
        differs: Whether the ranks that hold them are not the ranks that claim them.
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    block: Block
    differs: bool


@dataclass(frozen=True, slots=True)
class BoxWords:
    """The words in the tooltips of a side's boxes.

    Attributes:
        noun: What holds them.
        unlike: What is said of those that are marked because another holds them.
    """

    noun: str
    unlike: str = " (not as claimed)"


RANKS = BoxWords("rank")


def scale_for(panel: Panel) -> Scale:
    """Choose sizes in proportion to the blocks, none too small for its label."""
    many = len(panel.cols) > 1
    height = MAP_HEIGHT if len(panel.rows) > 1 else 2 * BOX_HEIGHT
    return Scale(
        _pixel_edges(panel.rows, height, BOX_HEIGHT),
        _pixel_edges(panel.cols, max(WIDE, BOX_WIDTH * len(panel.cols)) if many else NARROW, BOX_WIDTH),
    )


def _pixel_edges(spans: Sequence[Span], room: int, least: int) -> tuple[int, ...]:
    exact = sum(len(span) for span in spans if span.parts == 1)
    sizes = [max(least, round(len(span) * room / exact)) if span.parts == 1 else least * 3 // 2 for span in spans]
    return tuple(accumulate(sizes, initial=0))


def side(
    panel: Panel,
    grid: Grid,
    scale: Scale,
    coloring: Coloring,
    *,
    marked: bool = False,
    on_right: bool = False,
    said: BoxWords = RANKS,
) -> str:
    """Draw one side with its top left corner at 0, 0 and its titles above and next to it.

    Args:
        marked: Whether boxes that differ from the other side are marked.
        on_right: Whether the indices of rows are on the right.
        said: What holds the boxes.
    """
    boxes = "".join(_box(panel, box, scale, coloring, said) for box in _boxes(panel, grid, marked=marked))
    return boxes + _row_titles(panel.rows, grid, scale, on_right=on_right) + _column_titles(panel.cols, scale)


def title_width(panel: Panel) -> int:
    """Return the pixels that the indices of rows take."""
    if len(panel.rows) == 1 and len(panel.rows[0]) == 1:
        return 0
    grids = [grid for grid in (panel.claimed, panel.held) if grid is not None]
    titles = [title for grid in grids for _, _, title in row_stretches(panel.rows, grid)]
    return round(max(map(len, titles)) * CHAR) + 10


def _boxes(panel: Panel, grid: Grid, *, marked: bool) -> Iterator[Box]:
    """Join blocks to the right, and then downwards, if they do not differ."""
    open_boxes: dict[tuple[int, int], Box] = {}
    for row, span in enumerate(panel.rows):
        row_boxes: dict[tuple[int, int], Box] = {}
        for start, stop, block, differs in _runs(panel, grid, row, marked=marked):
            above = open_boxes.pop((start, stop), None)
            joins = above is not None and (above.block, above.differs) == (block, differs)
            goes_on = joins and span.parts == 1 and panel.rows[row - 1].parts == 1
            if above is not None and not goes_on:
                yield above
            top = above.rows[0] if above is not None and goes_on else row
            row_boxes[start, stop] = Box((top, row + 1), (start, stop), block, differs)
        yield from open_boxes.values()
        open_boxes = row_boxes
    yield from open_boxes.values()


def _runs(panel: Panel, grid: Grid, row: int, *, marked: bool) -> Iterator[tuple[int, int, Block, bool]]:
    keys = [
        (block, marked and differs, span.parts > 1 and at)
        for at, (block, differs, span) in enumerate(zip(grid[row], panel.wrong[row], panel.cols, strict=True))
    ]
    start = 0
    for col in range(1, len(keys) + 1):
        if col == len(keys) or keys[col] != keys[start]:
            yield start, col, *keys[start][:2]
            start = col


def _box(panel: Panel, box: Box, scale: Scale, coloring: Coloring, wording: BoxWords) -> str:
    left, top = scale.lefts[box.cols[0]], scale.tops[box.rows[0]]
    width, height = scale.lefts[box.cols[1]] - left, scale.tops[box.rows[1]] - top
    return tile(
        PixelBox(left, top, width, height),
        _label(box, coloring, int((width - 8) / CHAR) - box.differs, wording.noun),
        _tooltip(panel, box, wording),
        color=color_of(box.block, coloring),
        ranks=ranks_of(box.block.ranks),
        differs=box.differs,
    )


def color_of(block: Block, coloring: Coloring) -> str:
    """Return the color name of a block: its ranks', `mixed` for several hues, or `nobody`."""
    color = coloring.color_of(rank_array(block.ranks)) if block.ranks else -1
    return str(color) if color >= 0 else "mixed" if block.ranks else "nobody"


def _label(box: Box, coloring: Coloring, room: int, noun: str) -> str:
    sign = WRONG if box.differs else ""
    if not box.block.ranks and noun != "rank":
        return f"{sign} no {noun}".strip()
    return block_label(box.block, coloring, max(room, 3 + 2 * box.differs), sign)


def _tooltip(panel: Panel, box: Box, wording: BoxWords) -> str:
    """Describe a box in words for the tooltip."""
    noun = wording.noun
    rows, cols = panel.rows[box.rows[0] : box.rows[1]], panel.cols[box.cols[0] : box.cols[1]]
    where = f"[{rows[0].start}:{rows[-1].stop}, {cols[0].start}:{cols[-1].stop}]"
    numbers = ranks_text(box.block.ranks)
    nobody = "nobody" if noun == "rank" else f"no {noun}"
    ranks = f"{noun}{'s' * (len(ranks_of(box.block.ranks)) > 1)} {cut_at_comma(numbers, 80)}" if numbers else nobody
    is_elsewhere = any(any(row[slice(*box.cols)]) for row in panel.differs[slice(*box.rows)])
    in_place = f" ({' '.join(filter(None, (WRONG, ranks_text(box.block.part))))})"
    return f"{where}: {ranks}{'' if not box.differs else wording.unlike if is_elsewhere else in_place}"


def _row_titles(rows: Sequence[Span], grid: Grid, scale: Scale, *, on_right: bool) -> str:
    if len(rows) == 1 and len(rows[0]) == 1:
        return ""
    x, anchor = (scale.width + 8, "sv-start") if on_right else (-8, "sv-end")
    return "".join(
        element("text", words(title), x=x, y=(scale.tops[start] + scale.tops[stop]) // 2 + 4, class_=f"sv-i {anchor}")
        for start, stop, title in row_stretches(rows, grid)
    )


def _column_titles(cols: Sequence[Span], scale: Scale) -> str:
    if len(cols) == 1 and len(cols[0]) == 1:
        return ""
    widths = [right - left for left, right in zip(scale.lefts, scale.lefts[1:], strict=False)]
    titles = column_titles(cols, [width / CHAR for width in widths])
    return "".join(
        element("text", words(title), x=left + width // 2, y=-7, class_="sv-i")
        for title, left, width in zip(titles, scale.lefts, widths, strict=False)
    )


def bands(panel: Panel, scale: Scale, coloring: Coloring, width: int) -> str:
    """Draw bands from where each piece is claimed to where it is held; unmoved ones first."""
    drawn = []
    for mask, due, has in pieces(panel):
        color = f"sv-band sv-f{coloring.color(ranks_of(mask)[0])}"
        path = _band(panel.rows, scale, due, has, width)
        drawn.append((due != has, element("path", d=path, class_=color if due != has else f"{color} sv-still")))
    return "".join(path for _, path in sorted(drawn, key=lambda pair: pair[0]))


def has_bands(panel: Panel) -> bool:
    """Whether bands say where parts went: parts are stretches of one dim, and not too many."""
    return bool(pieces(panel))


def _band(rows: Sequence[Span], scale: Scale, due: Stretch, has: Stretch, width: int) -> str:
    (top, bottom), (to_top, to_bottom) = (
        (_pixel(rows, scale, low) + 1, _pixel(rows, scale, high) - 1) for low, high in (due, has)
    )
    bend = width // 2
    there = f"M0 {top}C{bend} {top} {bend} {to_top} {width} {to_top}"
    return f"{there}V{to_bottom}C{bend} {to_bottom} {bend} {bottom} 0 {bottom}Z"


def _pixel(rows: Sequence[Span], scale: Scale, index: float) -> int:
    """Return where an index is downwards."""
    row = max(bisect_right([span.start for span in rows], index) - 1, 0)
    share = min((index - rows[row].start) / len(rows[row]), 1)
    return round(scale.tops[row] + share * (scale.tops[row + 1] - scale.tops[row]))
