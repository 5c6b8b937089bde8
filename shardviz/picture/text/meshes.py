"""A mesh as text: ranks in a grid of named axes; with more than two axes, one grid for each place on the outer ones."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING

from shardviz.picture.model.palette import rank_style
from shardviz.picture.text.terminal import DIM, beside, line

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.text import Text

    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.picture.text.terminal import Glyphs

MOST_ROWS = 16
MOST_GRID_LINES = 40
"""Lines that the grids of all places on the outer axes may take together, were they below each other."""


def mesh_lines(mesh: Mesh, width: int, glyphs: Glyphs, marked: Collection[int] = ()) -> list[Text]:
    """Draw a mesh.

    Args:
        mesh: The mesh.
        width: Columns to use at most; ranks beyond them are counted.
        glyphs: The characters to draw with.
        marked: Ranks that carry the glyph of what differs.
    """
    outer = [list(range(size)) for size in mesh.shape[:-2]]
    grid_lines = min(mesh.shape[-2] if mesh.ndim > 1 else 1, MOST_ROWS) + 3
    places = list(islice(product(*outer), max(MOST_GRID_LINES // grid_lines, 1)))
    grids = [_grid(mesh, place, width, glyphs, marked) for place in places]
    lines: list[Text] = []
    while grids:
        count = _fitting(grids, width)
        lines += [*([line("")] if lines else []), *beside(grids[:count], gap=3)]
        grids = grids[count:]
    left = mesh.size // max(_grid_size(mesh), 1) - len(places)
    if left:
        lines.append(line((f"{glyphs.more} {left:,} more grids of {_grid_size(mesh):,} ranks", DIM)))
    return lines


def _grid_size(mesh: Mesh) -> int:
    size = 1
    for count in mesh.shape[-2:]:
        size *= count
    return size


def _fitting(grids: Sequence[list[Text]], width: int) -> int:
    """Return how many grids fit next to each other, at least one."""
    used = 0
    for count, grid in enumerate(grids):
        used += max(row.cell_len for row in grid) + 3
        if used - 3 > width and count:
            return count
    return len(grids)


def _grid(mesh: Mesh, place: Coord, width: int, glyphs: Glyphs, marked: Collection[int]) -> list[Text]:
    """Draw the last two axes at one place on the outer ones; a single axis is a row."""
    across = mesh.shape[-1] if mesh.ndim else 1
    down = mesh.shape[-2] if mesh.ndim > 1 else 1
    heads = [f"{mesh.axes[-2]}={row} " if mesh.ndim > 1 else "" for row in range(down)]
    gutter = max(map(len, heads))
    titles = [f"{mesh.axes[-1]}={col}" if mesh.ndim else "rank" for col in range(across)]
    cell = max(len(str(max(mesh.ranks))) + len(glyphs.differs) * bool(marked), *(len(title) for title in titles)) + 1
    cols = kept(across, max((width - gutter) // cell, 2))
    rows = kept(down, MOST_ROWS)
    title = ", ".join(f"{axis}={position}" for axis, position in zip(mesh.axes, place, strict=False))
    lines = [line((title, "bold"))] if title else []
    lines.append(line((" " * gutter + "".join(_title(titles, col, glyphs).rjust(cell) for col in cols), DIM)))
    for row in rows:
        if row is None:
            lines.append(line((f"{glyphs.more} {down - MOST_ROWS + 1:,} more".ljust(gutter), DIM)))
            continue
        ranks = [None if col is None else mesh.rank_at(_coord(mesh, place, row, col)) for col in cols]
        cells = [_cell(mesh, rank, cell, glyphs, marked) for rank in ranks]
        lines.append(line((heads[row].ljust(gutter), DIM), *cells))
    return lines


def _coord(mesh: Mesh, place: Coord, row: int, col: int) -> Coord:
    return (*place, row, col)[-mesh.ndim :] if mesh.ndim else ()


def _title(titles: Sequence[str], col: int | None, glyphs: Glyphs) -> str:
    return glyphs.more if col is None else titles[col]


def _cell(mesh: Mesh, rank: int | None, width: int, glyphs: Glyphs, marked: Collection[int]) -> tuple[str, str]:
    if rank is None:
        return glyphs.more.rjust(width), DIM
    text = f"{glyphs.differs}{rank}" if rank in marked else str(rank)
    return text.rjust(width), rank_style(rank, mesh)


def kept(count: int, most: int) -> list[int | None]:
    """Return the positions to draw, with None for those in between that are left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]
