"""A mesh as SVG: ranks in a grid of named axes; with more than two axes, a grid per position on the outer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import Scheme
from shardviz.picture.model.rank_grid import grids_of, kept
from shardviz.picture.svg.tile import CHAR, Place, tile

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.rank_grid import RankGrid

TILE_HEIGHT = 24
HEAD = 20
MOST_ROWS = 12
MOST_COLS = 10
MOST_GRIDS = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece of a picture.

    Attributes:
        markup: Its elements, with their top left corner at 0, 0.
        width: Pixels.
        height: Pixels.
    """

    markup: str
    width: int
    height: int


def mesh_drawing(mesh: Mesh, marked: Collection[int] = (), axes: tuple[str, ...] = ()) -> Drawn:
    """Draw a mesh; ranks that are `marked` carry the glyph `≠`, and colours are by `axes`, as in `Scheme`."""
    scheme = Scheme(mesh, axes)
    found, left = grids_of(mesh, MOST_GRIDS)
    grids = [_drawn(grid, marked, scheme) for grid in found]
    top, parts = 0, []
    for grid in grids:
        parts.append(element("g", grid.markup, transform=f"translate(0 {top})"))
        top += grid.height + 12
    if left:
        parts.append(element("text", words(f"⋮ {left:,} more grids"), x=0, y=top + 8, class_="sv-i sv-start"))
        top += HEAD
    return Drawn("".join(parts), max(grid.width for grid in grids), top - 12)


def _drawn(grid: RankGrid, marked: Collection[int], scheme: Scheme) -> Drawn:
    heads = [grid.row_title(row) for row in range(grid.num_rows)]
    titles = [grid.col_title(col) for col in range(grid.num_cols)]
    gutter = round(max(map(len, heads)) * CHAR) + (8 if grid.down else 0)
    longest = max(len(str(max(grid.mesh.ranks))) + 2 * bool(marked), *map(len, titles))
    step = round(longest * CHAR) + (14 if marked else 10)
    head = HEAD if grid.title else 0
    parts = [element("text", words(grid.title), x=0, y=12, class_="sv-h")] if grid.title else []
    rows, cols = kept(grid.num_rows, MOST_ROWS), kept(grid.num_cols, MOST_COLS)
    for at, col in enumerate(cols):
        parts.append(_title("⋮" if col is None else titles[col], gutter + at * step + step // 2, head + 13))
    for line, row in enumerate(rows):
        top = head + HEAD + line * TILE_HEIGHT
        text = heads[row] if row is not None else f"⋮ {grid.num_rows - len(rows) + 1}"
        parts.append(element("text", words(text), x=gutter - 8, y=top + 16, class_="sv-i sv-end") if gutter else "")
        for at, col in enumerate(cols):
            if row is None or col is None:
                parts.append(_title("⋮", gutter + at * step + step // 2, top + 16))
            else:
                rank = grid.rank_at(row, col)
                place = Place(gutter + at * step, top, step, TILE_HEIGHT)
                parts.append(_tile(grid.mesh, rank, place, scheme.colour(rank), differs=rank in marked))
    return Drawn("".join(parts), gutter + step * len(cols), head + HEAD + TILE_HEIGHT * len(rows))


def _title(text: str, x: int, y: int) -> str:
    return element("text", words(text), x=x, y=y, class_="sv-i")


def _tile(mesh: Mesh, rank: int, place: Place, colour: int, *, differs: bool) -> str:
    tooltip = f"rank {rank}: {mesh.label(rank)}{', not as claimed' if differs else ''}"
    return tile(place, str(rank), tooltip, colour=colour, ranks=(rank,), differs=differs)
