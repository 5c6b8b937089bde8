"""One panel of a drawing as SVG: boxes to scale, and the ranks in them.

Pixels are whole numbers, so that the bytes are stable.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.picture.model.drawing import column_titles, pieces, row_stretches
from shardviz.picture.model.holders import rank_array, ranks_of, ranks_text
from shardviz.picture.model.mesh import block_label
from shardviz.picture.model.palette import WRONG
from shardviz.picture.svg.tile import CHAR, PixelBox, tile
from shardviz.text import cut_at_comma

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.picture.model.drawing import Block, Grid, Panel, Span, Stretch
    from shardviz.picture.model.palette import Coloring

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
