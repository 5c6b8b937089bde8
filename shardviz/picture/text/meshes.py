"""A mesh as text: ranks in a grid of named axes, one grid for each position on outer axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.picture.model.mesh import grids_of, kept_positions, marked_among, rows_and_columns
from shardviz.picture.model.palette import Coloring, rank_style, style_of
from shardviz.picture.text.terminal import DIM, line, side_by_side, wrapped
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh import Heat, RankGrid
    from shardviz.picture.text.terminal import Glyphs, Terminal

MOST_ROWS = 16


MOST_GRID_LINES = 40
"""Lines that all grids may take together if they are below each other."""


@dataclass(frozen=True, slots=True)
class _CellMarks:
    """What a mesh's cells show besides ranks: marks or heat."""

    glyphs: Glyphs
    coloring: Coloring
    marked: Collection[int]
    heat: Heat | None

    def text(self, rank: int) -> str:
        sign = self.heat.sign(rank) if self.heat is not None else ""
        return f"{sign}{self.glyphs.wrong if rank in self.marked else ''}{rank}"

    def style(self, rank: int) -> str:
        return style_of("heat", self.heat.level(rank)) if self.heat is not None else rank_style(rank, self.coloring)

    def among(self, ranks: Iterable[int]) -> str:
        return marked_among(ranks, self.marked, self.glyphs.wrong)


def mesh_lines(
    mesh: Mesh,
    width: int,
    glyphs: Glyphs,
    marked: Collection[int] = (),
    axes: tuple[str, ...] = (),
    heat: Heat | None = None,
) -> list[Text]:
    """Draw a mesh.

    Args:
        width: Columns to use at most; ranks beyond them are counted.
        marked: Ranks that carry the glyph `wrong`; their rows and columns are shown before others.
        axes: The axes that ranks get their colors by, outermost first; by default all.
        heat: What ranks are colored by instead, with a sign for how much.
    """
    marks = _CellMarks(glyphs, Coloring(mesh, axes), marked, heat)
    grid_lines = min(mesh.shape[-2] if mesh.ndim > 1 else 1, MOST_ROWS) + 3
    shown, left = grids_of(mesh, max(MOST_GRID_LINES // grid_lines, 1), marked)
    grids = [_grid_lines(grid, width, marks) for grid in shown]
    lines: list[Text] = [*wrapped(str(heat), width, line(""), 2)] if heat is not None else []
    while grids:
        count = _num_fitting(grids, width)
        lines += [*([line("")] if lines else []), *side_by_side(grids[:count], gap=3)]
        grids = grids[count:]
    if not left:
        return lines
    size = shown[0].num_rows * shown[0].num_cols
    hidden = marks.among(rank for rank in marked if rank in mesh and not any(rank in grid for grid in shown))
    return [*lines, line((f"{glyphs.more} {counted(left, 'more grid')} of {counted(size, 'rank')}{hidden}", DIM))]


def heat_lines(mesh: Mesh, heat: Heat, terminal: Terminal) -> list[Text]:
    """Draw a mesh with heat, and an empty line below it; nothing if all ranks have the same."""
    least, most = heat.ends
    lines = mesh_lines(mesh, terminal.width, terminal.glyphs, heat=heat) if least < most else []
    return [*lines, *([line("")] if lines else [])]


def _num_fitting(grids: Sequence[list[Text]], width: int) -> int:
    """Return how many grids fit next to each other, at least one."""
    used = 0
    for count, grid in enumerate(grids):
        used += max(row.cell_len for row in grid) + 3
        if used - 3 > width and count:
            return count
    return len(grids)


def _grid_lines(grid: RankGrid, width: int, marks: _CellMarks) -> list[Text]:
    heads = [f"{grid.row_title(row)} " if grid.down else "" for row in range(grid.num_rows)]
    titles = [grid.col_title(col) for col in range(grid.num_cols)]
    gutter = max(map(len, heads))
    signs = len(marks.glyphs.wrong) * bool(marks.marked) + (marks.heat is not None)
    cell = max(len(str(max(grid.mesh.ranks))) + signs, *map(len, titles)) + 1
    wanted_rows, wanted_cols = rows_and_columns(marks.marked, grid)
    cols = kept_positions(grid.num_cols, max((width - gutter) // cell, 3), wanted_cols)
    shown = ((titles[col] if isinstance(col, int) else marks.glyphs.more).rjust(cell) for col in cols)
    lines = [line((grid.title, "bold"))] if grid.title else []
    lines.append(line((" " * gutter + "".join(shown), DIM)))
    for row in kept_positions(grid.num_rows, MOST_ROWS, wanted_rows):
        if isinstance(row, range):
            hidden = marks.among(grid.rank_at(at, col) for at in row for col in range(grid.num_cols))
            lines.append(line((f"{marks.glyphs.more} {counted(len(row), 'more row')}{hidden}".ljust(gutter), DIM)))
        else:
            lines.append(line((heads[row].ljust(gutter), DIM), *_row_cells(grid, row, cols, cell, marks)))
    return lines


def _row_cells(
    grid: RankGrid, row: int, cols: Iterable[int | range], width: int, marks: _CellMarks
) -> Iterator[tuple[str, str]]:
    """Write a row's ranks on their colors; a gap shows whether a hidden rank is marked."""
    for col in cols:
        if isinstance(col, range):
            is_marked = any(grid.rank_at(row, at) in marks.marked for at in col)
            yield (marks.glyphs.wrong if is_marked else marks.glyphs.more).rjust(width), DIM
        else:
            rank = grid.rank_at(row, col)
            yield " ", ""
            yield marks.text(rank).rjust(width - 1), marks.style(rank)
