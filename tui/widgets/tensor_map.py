"""The map of one tensor, zoomed and scrolled without limit, and the element under its cursor in words."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widgets import Static

from shardviz.picture.model.holders import ranks_in_words, ranks_of
from shardviz.picture.model.sides import CLAIMED_AND_HELD, found_in_place_of
from shardviz.picture.text.paint import Frame, PaintedViewport, paint
from shardviz.text import printable

from ..colors import block_style, verdict_style
from ..keys import arrows, keys
from ..model.rank import holders_at, hovered, named
from ..model.selection import Picked, Zoomed
from ..model.stored import StoredDocument, where
from ..model.zoom import Zoom, column_names, cuts_label, pointed_at, row_name
from .grid import BOLD, CHOSEN, DIM, Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual import events

    from shardviz.layout.mesh import Mesh
    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.sides import Cell, Sides
    from shardviz.picture.text.paint import Side

    from ..model.document import TensorEntry
    from ..model.selection import AnyDocument, Selection

    _Cells = tuple[tuple[str, ...], list[tuple[int, int]], list[list[tuple[int, Style]]]]
    """The characters of each row on screen, its indices, and the columns at which another style begins, with that."""


MOST_RANKS = 30
"""Characters of the ranks that are wrong."""

UNKNOWN_WIDTH = 1000


class Inspector(Static):
    """The ranks that should hold and do hold the element under the cursor; what is wrong with it."""

    _fitting: Callable[[int], Text] | None = None

    def show(self, document: AnyDocument, selection: Selection, sides: Sides | None, why: str = "") -> None:
        """Show the element under the cursor, as much as fits."""
        self._fitting = partial(inspector_text, document, selection, sides, why)
        self.on_resize()

    def on_resize(self) -> None:
        """Write as much as fits now."""
        if self._fitting is not None:
            self.update(self._fitting(self.size.width or UNKNOWN_WIDTH), layout=False)


def inspector_text(
    document: AnyDocument, selection: Selection, sides: Sides | None, why: str = "", width: int = UNKNOWN_WIDTH
) -> Text:
    """Write which ranks or which file has the element under the cursor, or why nothing is drawn.

    Coordinates of ranks are left out if they do not fit into `width`.
    """
    if sides is None:
        return Text(f"? not drawn: {printable(why)}", verdict_style("unknown"))
    if selection.plane is None:
        return Text("nothing to draw: the tensor has no elements", "dim")
    at = selection.plane.at
    if isinstance(document, StoredDocument):
        return where(document.stored(selection.entry), at)
    entry = document.entries[selection.entry]
    cell, index = sides.at(at), at[len(at) - len(entry.tensor.shape) :]
    text = _holders(index, sides, cell, entry.mesh or document.mesh)
    if text.cell_len > width:
        text = _holders(index, sides, cell, None)
    if cell.guilty and not cell.different:
        reasons = "; ".join(_reason(sides, ranks, words) for ranks, words in sides.reasons_at(cell))
        text.append(f"\n{reasons}", verdict_style("error"))
    elif sides.titles == CLAIMED_AND_HELD and (note := _in_its_place(entry, index, cell)):
        text.append(f"\n{note}", "dim")
    return text


def _holders(index: tuple[int, ...], sides: Sides, cell: Cell, mesh: Mesh | None) -> Text:
    text = Text.assemble((f"[{', '.join(map(str, index))}]", "bold"), no_wrap=True, overflow="ellipsis")
    for title, mask in holders_at(sides, cell):
        is_wrong = cell.different and title == sides.titles[1]
        text.append(f"  {title} ", "dim").append(named(mask, mesh), verdict_style("error") if is_wrong else "")
    return text


def _in_its_place(entry: TensorEntry, index: tuple[int, ...], cell: Cell) -> str:
    """Say what a rank holds instead of an element, or that it holds it in another place."""
    wrong = cell.due or cell.astray
    if not wrong:
        return ""
    rank = ranks_of(wrong)[0]
    if index_there := found_in_place_of(entry.tensor, index, rank):
        return f"rank {rank} holds [{', '.join(map(str, index_there))}] instead"
    return "" if cell.due else f"in another place of the shard on {ranks_in_words(ranks_of(wrong), MOST_RANKS)}"


def _reason(sides: Sides, ranks: int, words: str) -> str:
    """Say what is wrong with an element that is on the ranks that should hold it."""
    placed = "; placed as claimed" if sides.is_placed and not ranks & sides.missing else ""
    return f"{ranks_in_words(ranks_of(ranks), MOST_RANKS)}: {words}{placed}"


CURSOR_LEAST = 4
"""Columns from which on the cursor points at its element from both sides; a smaller one is reversed."""

HEADER = 1


class TensorMap(Grid):
    """The blocks of one plane of a tensor, labeled by rank or id. F1 shows `HELP`."""

    HELP = """\
## The map

The tensor to scale: rows downwards, columns to the right. Each block is labeled with the ranks that hold it:
`tp=1 ▸ fsdp 0…15` are many parts in one, those of tp 1 and in it of fsdp 0 to 15. The hue is a rank's place along the
outermost split, the shade that along the next; the mesh has the same colors.

- *claimed* is by the placements, *held* is where the ids really are. In the *difference*, what is right is gray, and
  `a→b` is a block that a should hold and b does. `tp=0: ✗ fsdp=127` is a block of which only that part is wrong.
- The lines below name the ranks that should hold the element under the cursor, and those that do; the mouse asks about
  any other.
- Zoomed all the way in, each number is an element, counted row by row from 0.
- Of a tensor with more than two dims, two are drawn, at one place of the others.
"""

    BINDINGS = keys(
        "map",
        hidden=[
            *arrows("move", "Move the cursor one cell {}"),
            *arrows("jump", "Move the cursor one block {}", "shift+"),
        ],
    ) + keys(
        "map",
        [
            ("plus,equals_sign", "zoom(1)", "Zoom in", "Show fewer indices, larger"),
            ("minus", "zoom(-1)", "Zoom out", "Show more indices, smaller"),
        ],
        hidden=[
            ("0", "fit", "Whole tensor", "Show the whole tensor"),
            ("pageup", "page(-1)", "Page up", "A screenful up"),
            ("pagedown", "page(1)", "Page down", "A screenful down"),
            ("home", "end(0)", "First", "To the first element"),
            ("end", "end(-1)", "Last", "To the last element"),
        ],
    )

    zoom: Zoom | None = None
    level = 0
    _suffix = ""
    _lit: int | None = None
    _cells: tuple[object, _Cells] | None = None
    _frame: Frame | None = None
    _hovered: tuple[int, ...] = ()
    describe: Callable[[tuple[int, ...]], str] | None = None
    """Says who has the element under the mouse; by default its ranks."""

    def show(
        self, sides: Sides | None, side: Side, plane: Plane | None, suffix: str = "", lit: int | None = None
    ) -> None:
        """Show one side of a tensor on a plane; zoom and cursor stay where the tensor does."""
        dims = (plane.rows, plane.cols) if plane is not None else None
        is_same = self.zoom is not None and self.zoom.sides is sides and self.zoom.dims == dims
        shown = (self.zoom.side, self._suffix, self._lit) if self.zoom is not None else None
        if plane is not None and is_same and shown == (side, suffix, lit):
            self._move_to(plane.at)
            return
        self.level = self.level if is_same else 0
        self._suffix, self._lit = suffix, lit
        self.zoom = Zoom(sides, plane, side) if sides and plane and all(sides.holders.shape) else None
        self.fit()

    @property
    def place(self) -> tuple[int, ...]:
        """The element under the cursor; empty if there is nothing to draw."""
        return self.zoom.plane.at if self.zoom else ()

    @property
    def frame(self) -> Frame | None:
        """The drawing; None if there is nothing to draw."""
        if (zoom := self.zoom) is None:
            return None
        rows, cols, ids = zoom.rulers(self.level, *self._room)
        return Frame(zoom.sides, zoom.side, zoom.plane, rows, cols, ids, self._suffix, self._lit)

    @property
    def _gutter(self) -> int:
        return len(str(self.zoom.height)) + 1 if self.zoom else 0

    @property
    def _room(self) -> tuple[int, int]:
        return max(self.room.height - HEADER, 1), max(self.room.width - self._gutter, 1)

    def fit(self) -> None:
        """Fit the map into its room."""
        frame = self.frame
        width, height = (frame.cols.extent, frame.rows.extent) if frame else (0, 0)
        self.styles.overflow_x = self.styles.overflow_y = "auto" if self.level else "hidden"  # a whole one has no bars
        self.virtual_size = Size(self._gutter + width, HEADER + height)
        self.refresh()
        self.scroll_to_cursor()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines of one frame."""
        self._frame = self.frame
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Paint one line of the screen."""
        frame = self._frame
        if frame is None:
            return self.blank
        (left, top), dim, bold = self.scroll_offset, self.base + DIM, self.base + BOLD
        if y < HEADER:
            before, name, behind = column_names(frame, self.place[frame.plane.cols], left, self._room[1])
            return self.strip_of([Segment(" " * self._gutter + before, dim), Segment(name, bold), Segment(behind, dim)])
        (chars, rows, stretches), line = self._painted(frame, top, left), y - HEADER
        if line < len(chars):
            name, here = row_name(frame, self.place[frame.plane.rows], top + line, rows[line], every=self.level > 0)
            gutter = Segment(name.rjust(self._gutter - 1) + " ", bold if here else dim)
            return self.strip_of([gutter, *self._segments(frame, chars[line], rows[line], stretches[line])])
        if top + line == frame.rows.extent and not frame.rows.lines and frame.rows.size > 1:
            return self.strip_of([Segment(str(frame.rows.size).rjust(self._gutter - 1), dim)])
        return self.blank

    def _painted(self, frame: Frame, top: int, left: int) -> _Cells:
        """Return the cells on screen, painted once until something else is shown there."""
        dims = (frame.plane.rows, frame.plane.cols)
        elsewhere = [at for dim, at in enumerate(self.place) if dim not in dims]
        drawn = (frame.sides, frame.side, self._suffix, self._lit, dims, elsewhere, self.level)
        key = (*drawn, self.size, top, left, self.base, self.palette)
        if self._cells is None or self._cells[0] != key:
            painted = paint(frame, top, left, *self._room)
            rows = [(start, stop) for start, stop in frame.rows.spans(top, self._room[0]).tolist()]
            self._cells = (key, (painted.chars, rows, self._stretches(painted)))
        return self._cells[1]

    def _stretches(self, painted: PaintedViewport) -> list[list[tuple[int, Style]]]:
        """Join neighbors that look alike; LINE and OUTSIDE count from the end of the styles."""
        behind = self.background_colors[1].hex
        looks = [block_style(look.tone, look.color, behind, self.palette) for look in painted.of]
        numbers: dict[Style, int] = {}
        number_of = [numbers.setdefault(style, len(numbers)) for style in (*looks, self.base + DIM, self.base)]
        codes, styles = np.array(number_of, np.int64)[painted.looks], list(numbers)
        stretches = [[(0, styles[code])] for code in codes[:, :1].ravel().tolist()]
        rows, columns = np.nonzero(codes[:, 1:] != codes[:, :-1])
        for row, column, code in zip(rows.tolist(), columns.tolist(), codes[rows, columns + 1].tolist(), strict=True):
            stretches[row].append((column + 1, styles[code]))
        return stretches

    def _segments(
        self, frame: Frame, text: str, row: tuple[int, int], stretches: list[tuple[int, Style]]
    ) -> list[Segment]:
        """Write the stretches of a line, with the cursor on its columns."""
        at = self.place[frame.plane.cols]
        begin = frame.cols.cell_of(at) - self.scroll_offset.x
        low, high = max(begin, 0), min(begin + frame.cols.cells_of(at), len(text))
        is_here = row[0] <= self.place[frame.plane.rows] < row[1] and low < high
        is_pointed = is_here and high - low >= CURSOR_LEAST and not frame.ids and not cuts_label(text, (low, high))
        text = pointed_at(text, (low, high)) if is_pointed else text
        ends = [*(start for start, _ in stretches[1:]), len(text)]
        segments = [Segment(text[start:end], style) for (start, style), end in zip(stretches, ends, strict=True)]
        if not is_here:
            return segments
        before, here, behind = Strip(segments).divide([low, high, len(text)])
        exchanged = self.base.color is not None and self.base.bgcolor is not None
        reverse = Style(color=self.base.bgcolor, bgcolor=self.base.color, bold=True) if exchanged else CHOSEN
        cursor = BOLD if is_pointed else reverse
        return [*before, *(Segment(part, (style or self.base) + cursor) for part, style, _ in here), *behind]

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor by cells of the screen."""
        if self.zoom and (frame := self.frame):
            self.go(self.zoom.moved(frame, down, right))

    def action_page(self, step: int) -> None:
        """Move the cursor by a screenful of rows."""
        if self.zoom and (frame := self.frame):
            row = self.zoom.paged(frame, step * max(self._room[0] - 1, 1))
            self.go(self.zoom.placed(row, self.place[frame.plane.cols]))

    def action_end(self, index: int) -> None:
        """Move the cursor to the first or the last element of the drawn plane."""
        if self.zoom:
            self.go(self.zoom.placed(index % self.zoom.height, index % self.zoom.width))

    def action_jump(self, down: int, right: int) -> None:
        """Move the cursor by blocks."""
        if self.zoom:
            self.go(self.zoom.jumped(down, right))

    def action_zoom(self, step: int) -> None:
        """Zoom in or out by a factor of two, around the cursor."""
        self.zoom_to(self.level + step)
        self.post_message(Zoomed(self.level))

    def action_fit(self) -> None:
        """Show the whole tensor."""
        self.action_zoom(-self.level)

    def zoom_to(self, level: int) -> None:
        """Zoom to a level, or as near to it as there is one, around the cursor."""
        if self.zoom is not None:
            self.level = min(max(level, 0), self.zoom.deepest(*self._room))
            self.fit()
            self.scroll_to_cursor(center=True)

    def go(self, place: tuple[int, ...]) -> None:
        """Put the cursor on an element, bring it into view, and say so."""
        if self.zoom is not None:
            self._move_to(place)
            self.post_message(Picked(plane=self.zoom.plane))

    def _move_to(self, place: tuple[int, ...]) -> None:
        if self.zoom is not None and place != self.place:
            self.zoom = replace(self.zoom, plane=replace(self.zoom.plane, at=place))
            self.scroll_to_cursor()
            self.refresh()

    def scroll_to_cursor(self, *, center: bool = False) -> None:
        """Keep the cursor in view, or in the middle."""
        if (frame := self.frame) is None:
            return
        row, col = self.place[frame.plane.rows], self.place[frame.plane.cols]
        x, y, (height, width) = frame.cols.cell_of(col), frame.rows.cell_of(row), self._room
        if center:
            self.scroll_to(x - width // 2, y - height // 2, animate=False)
        else:
            self.bring_into_view(Region(x - 1, y - 1, frame.cols.cells_of(col) + 2 + self._gutter, 3 + HEADER))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        if place := self._place_at(event.x, event.y):
            self.go(place)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Say who holds the element under the mouse."""
        place = self._place_at(event.x, event.y)
        if not place or self.zoom is None:
            self.tooltip = None
        elif place != self._hovered:
            self.tooltip = Text(self.describe(place) if self.describe else hovered(self.zoom.sides, place, place))
        self._hovered = place

    def _place_at(self, x: int, y: int) -> tuple[int, ...]:
        """Return the element at a column and a line of the screen; empty beside the map."""
        frame = self.frame
        if frame is None or not self.zoom:
            return ()
        left, top = self.scroll_offset
        row, col = frame.rows.spans(y - HEADER + top, 1), frame.cols.spans(x - self._gutter + left, 1)
        if y < HEADER or x < self._gutter or not len(row) or not len(col):
            return ()
        return self.zoom.placed(min(int(row[0, 0]), self.zoom.height - 1), min(int(col[0, 0]), self.zoom.width - 1))
