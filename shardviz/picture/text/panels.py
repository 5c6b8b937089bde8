"""A drawing as text: boxes to scale, the ranks in them, indices along their sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from shardviz.picture.model.holders import ranks_of
from shardviz.picture.model.labels import ranks_label
from shardviz.picture.model.palette import rank_style
from shardviz.picture.text.terminal import BAD, DIM, line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.drawing import Block, Grid, Panel, Span
    from shardviz.picture.text.terminal import Glyphs

MOST_LINES = 24
"""Lines that a panel's blocks are stretched to at most to be to scale."""

MOST_RULED = 12
"""With more rows of blocks than this no line is drawn between them."""

MIN_CELL = 6
MAX_CELL = 28


@dataclass(frozen=True, slots=True)
class Frame:
    """What the boxes of a panel have in common, so that its two sides line up.

    Attributes:
        heights: Lines of each row of blocks.
        widths: Columns of each column of blocks, without the lines between them.
        gutter: Columns for the indices of rows.
        ruled: Whether a line may stand between rows of blocks.
        room: Characters for the ranks of a block.
    """

    heights: tuple[int, ...]
    widths: tuple[int, ...]
    gutter: int
    ruled: bool
    room: int

    @property
    def width(self) -> int:
        """Columns of the whole."""
        return self.gutter + 1 + sum(self.widths) + len(self.widths) + 1


def frame_for(panel: Panel, mesh: Mesh | None, width: int, glyphs: Glyphs) -> Frame:
    """Choose the sizes of a panel's boxes to scale within `width` columns.

    Both sides share one frame. It may come out wider than `width` where even the smallest boxes do not fit.
    """
    grids = [grid for grid in (panel.claimed, panel.held) if grid is not None]
    gutter = max(len(title) for grid in grids for title in _row_titles(panel.rows, grid, glyphs))
    inner = width - gutter - len(panel.cols) - 2
    most = max(MIN_CELL, min(inner // len(panel.cols), MAX_CELL))
    mark = len(glyphs.differs) + 1 if panel.is_different else 0
    room = most - 2 - mark
    need = max(max(map(len, _labels(panel, mesh, room))) + 2 + mark, MIN_CELL)
    titles = [len(_span_title(span, glyphs)) for span in panel.cols]
    smallest = [max(need, title + 2) if sum(titles) + 2 * len(titles) <= inner else need for title in titles]
    ruled = len(panel.rows) <= MOST_RULED
    return Frame(_heights(panel.rows), _widths(panel.cols, smallest, inner), gutter, ruled, room)


def side_lines(
    panel: Panel, grid: Grid, frame: Frame, mesh: Mesh | None, glyphs: Glyphs, *, marked: bool
) -> list[Text]:
    """Draw one side of a panel.

    Args:
        panel: The blocks.
        grid: The side's ranks.
        frame: The sizes.
        mesh: What names sets of ranks.
        glyphs: The characters to draw with.
        marked: Whether blocks that differ from the other side carry the glyph.
    """
    titles = _row_titles(panel.rows, grid, glyphs)
    lines = [_column_titles(panel, frame, glyphs)] if len(panel.cols) > 1 or len(panel.cols[0]) > 1 else []
    for row in range(len(panel.rows)):
        if row == 0 or frame.ruled:
            lines.append(_rule(grid, row, frame, glyphs))
        lines += _row_lines(panel, grid, row, titles[row], frame, mesh, glyphs, marked=marked)
    return [*lines, _rule(grid, len(grid), frame, glyphs)]


def _labels(panel: Panel, mesh: Mesh | None, room: int) -> list[str]:
    blocks = {block for grid in (panel.claimed, panel.held) if grid for row in grid for block in row}
    return [_label(block, mesh, room) for block in blocks]


def _label(block: Block, mesh: Mesh | None, room: int) -> str:
    if block.is_mixed:
        return f"~{ranks_label(block.ranks, mesh, room - 1)}"
    return ranks_label(block.ranks, mesh, room)


def _heights(rows: Sequence[Span]) -> tuple[int, ...]:
    """Give each row lines in proportion to its size; parts that are not drawn one by one get one line."""
    unit = float(min((len(span) for span in rows if span.parts == 1), default=1))
    while True:
        heights = tuple(max(1, round(len(span) / unit)) if span.parts == 1 else 1 for span in rows)
        if sum(heights) <= max(MOST_LINES, len(rows)):
            return heights
        unit *= 1.25


def _widths(cols: Sequence[Span], smallest: Sequence[int], inner: int) -> tuple[int, ...]:
    """Give each column room in proportion to its size, never less than it needs."""
    if len(cols) == 1:
        return (max(smallest[0], min(16, inner)),)
    exact = [len(span) for span in cols if span.parts == 1]
    unit = min(exact, default=1) / max(smallest)
    while True:
        widths = tuple(
            max(least, round(len(span) / unit)) if span.parts == 1 else least
            for span, least in zip(cols, smallest, strict=True)
        )
        if sum(widths) <= inner or widths == tuple(smallest):
            return widths
        unit *= 1.1


def _span_title(span: Span, glyphs: Glyphs) -> str:
    return str(span) if span.parts == 1 else f"{glyphs.more} {span.parts:,}"


def _row_titles(rows: Sequence[Span], grid: Grid, glyphs: Glyphs) -> list[str]:
    """Name the rows of a side: neighbours with the same ranks are one stretch, named at its first row."""
    if len(rows) == 1 and len(rows[0]) == 1:
        return [" "]
    titles = []
    for row, span in enumerate(rows):
        if span.parts > 1:
            titles.append(f"{glyphs.more} {span.parts:,} parts")
        elif row and grid[row - 1] == grid[row] and rows[row - 1].parts == 1:
            titles.append("")
        else:
            last = row
            while last + 1 < len(rows) and grid[last + 1] == grid[row] and rows[last + 1].parts == 1:
                last += 1
            titles.append(f"{span.start}:{rows[last].stop}")
    return titles


def _column_titles(panel: Panel, frame: Frame, glyphs: Glyphs) -> Text:
    titles = [_span_title(span, glyphs) for span in panel.cols]
    if any(len(title) > width for title, width in zip(titles, frame.widths, strict=True)):
        titles = [str(span.start) if span.parts == 1 else glyphs.more for span in panel.cols]
        cells = [title[:width].ljust(width) for title, width in zip(titles, frame.widths, strict=True)]
    else:
        cells = [title.center(width) for title, width in zip(titles, frame.widths, strict=True)]
    return line((" " * (frame.gutter + 2) + " ".join(cells), DIM))


def _rule(grid: Grid, row: int, frame: Frame, glyphs: Glyphs) -> Text:
    """Draw the line above a row of blocks; where the same ranks hold both sides of it, it is open."""
    num_rows, num_cols = len(grid), len(grid[0])

    def is_line(col: int) -> bool:
        return 0 <= col < num_cols and (row in (0, num_rows) or grid[row - 1][col] != grid[row][col])

    def is_wall(at_row: int, col: int) -> bool:
        if not 0 <= at_row < num_rows:
            return False
        return col in (0, num_cols) or grid[at_row][col - 1] != grid[at_row][col]

    drawn = []
    for col in range(num_cols + 1):
        arms = is_wall(row - 1, col) + 2 * is_wall(row, col) + 4 * is_line(col - 1) + 8 * is_line(col)
        drawn.append(glyphs.corners[arms])
        if col < num_cols:
            drawn.append(glyphs.corners[12 if is_line(col) else 0] * frame.widths[col])
    return line(" " * (frame.gutter + 1), ("".join(drawn), DIM))


def _row_lines(
    panel: Panel, grid: Grid, row: int, title: str, frame: Frame, mesh: Mesh | None, glyphs: Glyphs, *, marked: bool
) -> list[Text]:
    """Draw a row of blocks: ranks on its first line, the others empty."""
    wall = glyphs.corners[3]
    first, below = Text(wall, DIM), Text(wall, DIM)
    for start, stop in _runs(grid[row]):
        width = sum(frame.widths[start:stop]) + stop - start - 1
        differs = marked and any(panel.differs[row][start:stop])
        goes_on = row > 0 and all(
            grid[row - 1][col] == grid[row][start] and panel.differs[row - 1][col] >= differs
            for col in range(start, stop)
        )
        label = Text() if goes_on else _cell(grid[row][start], mesh, frame, glyphs, differs=differs)
        first = line(first, _centred(label, width), (wall, DIM))
        below = line(below, " " * width, (wall, DIM))
    return [
        line((title.rjust(frame.gutter), DIM), " ", first),
        *(line(" " * (frame.gutter + 1), below) for _ in range(frame.heights[row] - 1)),
    ]


def _cell(block: Block, mesh: Mesh | None, frame: Frame, glyphs: Glyphs, *, differs: bool) -> Text:
    label = _label(block, mesh, frame.room)
    if differs:
        return line((f"{glyphs.differs} {label}", BAD))
    ranks = ranks_of(block.ranks)
    return line((label, rank_style(ranks[0], mesh) if ranks else BAD))


def _centred(text: Text, width: int) -> Text:
    left = max(width - text.cell_len, 0) // 2
    return line(" " * left, text, " " * max(width - text.cell_len - left, 0))


def _runs(row: Sequence[Block]) -> list[tuple[int, int]]:
    """Return neighbours that the same ranks hold, as (first column, one past the last)."""
    starts = [col for col in range(len(row)) if col == 0 or row[col - 1] != row[col]]
    return list(zip(starts, [*starts[1:], len(row)], strict=True))
