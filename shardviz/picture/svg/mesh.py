"""A mesh as SVG: ranks in a grid of named axes, one grid for each position on outer axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.markup import element, words
from shardviz.picture.model.mesh import grids_of, kept_positions, marked_among, rows_and_columns
from shardviz.picture.model.palette import WRONG, Coloring
from shardviz.picture.svg.tile import CHAR, PixelBox, SvgFragment, tile
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.mesh import Heat, RankGrid

TILE_HEIGHT = 24
HEAD = 20
MOST_ROWS = 12
MOST_COLS = 10
MOST_GRIDS = 4


@dataclass(frozen=True, slots=True)
class _TileMarks:
    """What a mesh's tiles show besides ranks: marks or heat."""

    coloring: Coloring
    marked: Collection[int]
    heat: Heat | None


def mesh_drawing(
    mesh: Mesh, marked: Collection[int] = (), axes: tuple[str, ...] = (), heat: Heat | None = None
) -> SvgFragment:
    """Draw a mesh.

    Args:
        mesh: The mesh.
        marked: Ranks that carry the glyph `✗`; their rows and columns are shown before others.
        axes: The axes that ranks get their colors by, outermost first; by default all.
        heat: What ranks are colored by instead, with a sign for how much.
    """
    marks = _TileMarks(Coloring(mesh, axes), marked, heat)
    shown, left = grids_of(mesh, MOST_GRIDS, marked)
    grids = [_draw_grid(grid, marks) for grid in shown]
    width, top, parts = max(grid.width for grid in grids), 0, list[str]()
    if heat is not None:
        parts.append(element("text", words(str(heat)), x=0, y=12, class_="sv-soft"))
        width, top = max(width, round(cell_len(str(heat)) * CHAR)), HEAD
    for grid in grids:
        parts.append(element("g", grid.markup, transform=f"translate(0 {top})"))
        top += grid.height + 12
    if left:
        hidden = (rank for rank in marked if rank in mesh and not any(rank in grid for grid in shown))
        text = f"… {counted(left, 'more grid')}{marked_among(hidden, marks.marked)}"
        parts.append(element("text", words(text), x=0, y=top + 8, class_="sv-i sv-start"))
        top += HEAD
    return SvgFragment("".join(parts), width, top - 12)


def _draw_grid(grid: RankGrid, marks: _TileMarks) -> SvgFragment:
    heads = [grid.row_title(row) for row in range(grid.num_rows)]
    titles = [grid.col_title(col) for col in range(grid.num_cols)]
    signs = 2 * bool(marks.marked) + 2 * (marks.heat is not None)
    longest = max(len(str(max(grid.mesh.ranks))) + signs, *map(len, titles))
    step = round(longest * CHAR) + (14 if marks.marked else 10)
    head = HEAD if grid.title else 0
    parts = [element("text", words(grid.title), x=0, y=12, class_="sv-h")] if grid.title else []
    wanted_rows, wanted_cols = rows_and_columns(marks.marked, grid)
    rows = kept_positions(grid.num_rows, MOST_ROWS, wanted_rows)
    cols = kept_positions(grid.num_cols, MOST_COLS, wanted_cols)
    texts = [heads[row] if isinstance(row, int) else _gap_text(grid, row, marks) for row in rows]
    gutter = round(max(map(len, texts)) * CHAR) + (8 if grid.down else 0) + 8 * any(WRONG in text for text in texts)
    for at, col in enumerate(cols):
        text = titles[col] if isinstance(col, int) else "…"
        parts.append(_title(text, gutter + at * step + step // 2, head + 13))
    for line, (row, text) in enumerate(zip(rows, texts, strict=True)):
        top = head + HEAD + line * TILE_HEIGHT
        parts.append(element("text", words(text), x=gutter - 8, y=top + 16, class_="sv-i sv-end") if gutter else "")
        places = [PixelBox(gutter + at * step, top, step, TILE_HEIGHT) for at in range(len(cols))]
        parts += (_cell(grid, row, col, place, marks) for col, place in zip(cols, places, strict=True))
    return SvgFragment("".join(parts), gutter + step * len(cols), head + HEAD + TILE_HEIGHT * len(rows))


def _gap_text(grid: RankGrid, rows: range, marks: _TileMarks) -> str:
    hidden = marked_among((grid.rank_at(row, col) for row in rows for col in range(grid.num_cols)), marks.marked)
    return f"… {counted(len(rows), 'more row')}{hidden}"


def _title(text: str, x: int, y: int) -> str:
    return element("text", words(text), x=x, y=y, class_="sv-i")


def _cell(grid: RankGrid, row: int | range, col: int | range, place: PixelBox, marks: _TileMarks) -> str:
    """Draw a rank, or in place of those that are left out whether any of them is marked."""
    if isinstance(row, int) and isinstance(col, int):
        return _tile(grid, grid.rank_at(row, col), place, marks)
    rows, cols = (range(at, at + 1) if isinstance(at, int) else at for at in (row, col))
    is_marked = any(grid.rank_at(one, other) in marks.marked for one in rows for other in cols)
    return _title(WRONG if is_marked else "…", place.left + place.width // 2, place.top + 16)


def _tile(grid: RankGrid, rank: int, place: PixelBox, marks: _TileMarks) -> str:
    tooltip, label = f"rank {rank}: {grid.mesh.label(rank)}", str(rank)
    color: object = marks.coloring.color(rank)
    if marks.heat is not None:
        known = rank in marks.heat.by_rank
        tooltip += f", {marks.heat.title} {marks.heat.text(marks.heat.by_rank[rank])}" if known else ""
        label, color = f"{marks.heat.sign(rank)} {rank}", f"h{marks.heat.level(rank)}" if known else "nobody"
    if rank in marks.marked:
        tooltip, label = f"{tooltip}, in a finding", f"{WRONG} {label}"
    return tile(place, label, tooltip, color=color, ranks=(rank,), differs=rank in marks.marked)
