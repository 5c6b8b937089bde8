"""A mesh as text: ranks in a grid of named axes; with more than two axes, a grid per position on the outer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.model.palette import Scheme, rank_style
from shardviz.picture.model.rank_grid import grids_of, kept
from shardviz.picture.text.terminal import DIM, beside, line

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.rank_grid import RankGrid
    from shardviz.picture.text.terminal import Glyphs

MOST_ROWS = 16
MOST_GRID_LINES = 40
"""Lines that all grids may take together if they are below each other."""


def mesh_lines(
    mesh: Mesh, width: int, glyphs: Glyphs, marked: Collection[int] = (), axes: tuple[str, ...] = ()
) -> list[Text]:
    """Draw a mesh.

    Args:
        mesh: The mesh.
        width: Columns to use at most; ranks beyond them are counted.
        glyphs: The characters to draw with.
        marked: Ranks that carry the glyph `differs`.
        axes: The axes that ranks get their colours by, outermost first; by default all.
    """
    scheme = Scheme(mesh, axes)
    grid_lines = min(mesh.shape[-2] if mesh.ndim > 1 else 1, MOST_ROWS) + 3
    found, left = grids_of(mesh, max(MOST_GRID_LINES // grid_lines, 1))
    size = found[0].num_rows * found[0].num_cols
    grids = [_grid_lines(grid, width, glyphs, marked, scheme) for grid in found]
    lines: list[Text] = []
    while grids:
        count = _fitting(grids, width)
        lines += [*([line("")] if lines else []), *beside(grids[:count], gap=3)]
        grids = grids[count:]
    return [*lines, line((f"{glyphs.more} {left:,} more grids of {size:,} ranks", DIM))] if left else lines


def _fitting(grids: Sequence[list[Text]], width: int) -> int:
    """Return how many grids fit next to each other, at least one."""
    used = 0
    for count, grid in enumerate(grids):
        used += max(row.cell_len for row in grid) + 3
        if used - 3 > width and count:
            return count
    return len(grids)


def _grid_lines(grid: RankGrid, width: int, glyphs: Glyphs, marked: Collection[int], scheme: Scheme) -> list[Text]:
    heads = [f"{grid.row_title(row)} " if grid.down else "" for row in range(grid.num_rows)]
    titles = [grid.col_title(col) for col in range(grid.num_cols)]
    gutter = max(map(len, heads))
    cell = max(len(str(max(grid.mesh.ranks))) + len(glyphs.differs) * bool(marked), *map(len, titles)) + 1
    cols = kept(grid.num_cols, max((width - gutter) // cell, 2))
    shown = ((glyphs.more if col is None else titles[col]).rjust(cell) for col in cols)
    lines = [line((grid.title, "bold"))] if grid.title else []
    lines.append(line((" " * gutter + "".join(shown), DIM)))
    for row in kept(grid.num_rows, MOST_ROWS):
        if row is None:
            lines.append(line((f"{glyphs.more} {grid.num_rows - MOST_ROWS + 1:,} more".ljust(gutter), DIM)))
            continue
        ranks = [None if col is None else grid.rank_at(row, col) for col in cols]
        cells = [part for rank in ranks for part in _cell(rank, cell, glyphs, marked, scheme)]
        lines.append(line((heads[row].ljust(gutter), DIM), *cells))
    return lines


def _cell(
    rank: int | None, width: int, glyphs: Glyphs, marked: Collection[int], scheme: Scheme
) -> list[tuple[str, str]]:
    """Write a rank on its colour, with a gap before it."""
    if rank is None:
        return [(glyphs.more.rjust(width), DIM)]
    text = f"{glyphs.differs}{rank}" if rank in marked else str(rank)
    return [(" ", ""), (text.rjust(width - 1), rank_style(rank, scheme))]
