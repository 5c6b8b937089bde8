"""The map of one tensor: blocks to scale between indices, with a cursor, zoomed and scrolled without limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size

from shardviz.picture.text.paint import Frame, Painted, paint

from ..colors import block_style
from ..keys import arrows, keys
from ..model.messages import PlaceChosen, Zoomed
from ..model.zoom import Zoom
from .grid import BOLD, DIM, Grid
from .inspector import hovered

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual import events
    from textual.binding import BindingType
    from textual.strip import Strip

    from shardviz.picture.model.holders import Plane
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Side


CURSOR_LEAST = 4
"""Columns from which on the cursor points at its element from both sides; a smaller one is reversed."""

POINTERS = "»", "«"


def cuts_label(text: str, cursor: tuple[int, int]) -> bool:
    """Whether an edge of the cursor lies on a label, or beside one."""
    low, high = cursor
    return bool((text[low : low + 2] + text[high - 2 : high]).strip(" │├┤┼"))


def pointed_at(text: str, cursor: tuple[int, int]) -> str:
    """Put the cursor's pointers at both ends of its columns, from one up to but not including the other."""
    low, high = cursor
    left, right = POINTERS
    return text[:low] + left + text[low + 1 : high - 1] + right + text[high:]


def row_name(frame: Frame, at: int, row: int, span: tuple[int, int], *, every: bool) -> tuple[str, bool]:
    """Name a row of the screen: a block at its first row, the end on the last line, and all rows where that is asked.

    Args:
        frame: What is drawn.
        at: The row of the tensor that the cursor is on.
        row: The row of the map's cells.
        span: What it covers; start and stop are equal on a line.
        every: Whether all rows are named.

    Returns:
        The name, and whether it is the cursor's.
    """
    start, stop = span
    size = frame.rows.size
    if size == 1:
        return "", False
    if start == stop:
        return (str(size), False) if row == frame.rows.extent - 1 else ("", False)
    is_first = row == frame.rows.cell_of(start)
    begins = is_first and frame.rows.block_of(start)[0] == start
    is_named = (is_first and (every or frame.ids)) or begins
    return (str(start) if is_named else ""), is_named and start <= at < max(stop, start + 1)


def column_names(frame: Frame, at: int, left: int, width: int, gutter: int, base: Style) -> list[Segment]:
    """Name the columns at their first cells, the first and the last before the others; the cursor's is bold."""
    names = _columns(frame, left, width)
    line, bold = [" "] * width, range(0)
    for begin, text, start in sorted(names, key=lambda name: name is not names[0] and name is not names[-1]):
        cells = range(max(begin - 1, 0), min(begin + len(text) + 1, width))
        if all(line[cell] == " " for cell in cells):
            line[begin : begin + len(text)] = list(text)
            bold = range(begin, begin + len(text)) if start == at else bold
    text = "".join(line)
    before, after = " " * gutter + text[: bold.start], text[bold.stop :]
    return [
        Segment(before, base + DIM),
        Segment(text[bold.start : bold.stop], base + BOLD),
        Segment(after, base + DIM),
    ]


def _columns(frame: Frame, left: int, width: int) -> list[tuple[int, str, int]]:
    """Return where the names of columns begin, the names, and the columns; of a line there are none."""
    if frame.cols.size == 1:
        return []
    names, before = [], None
    for x, span in enumerate(map(tuple, frame.cols.spans(left, width).tolist())):
        is_end = span[0] == span[1] == frame.cols.size
        if span != before and (is_end or (span[0] < span[1] and _is_named(frame, span[0], before is None))):
            text = str(span[0])
            names.append((max(min(x, width - len(text)), 0), text, span[0]))
        before = span
    return names


def _is_named(frame: Frame, start: int, is_first: bool) -> bool:
    return is_first or frame.ids or not frame.cols.lines or frame.cols.block_of(start)[0] == start


HEADER = 1
REVERSE = Style(reverse=True, bold=True)


@dataclass(frozen=True)
class _Viewport:
    """The visible part: the characters, the indices of each row, and the stretches of one style that it is made of."""

    chars: tuple[str, ...]
    rows: list[tuple[int, int]]
    stretches: list[list[tuple[int, Style]]]
    """For each row the columns at which another style begins, with that."""


def _dims(plane: Plane) -> tuple[int, int]:
    return plane.rows, plane.cols


class TensorMap(Grid):
    """The blocks of one plane of a tensor, labelled by rank or id. F1 shows `HELP`."""

    HELP = """\
## The map

The tensor to scale: rows downwards, columns to the right. Each block is labelled with the ranks that hold it:
`tp=1 ▸ fsdp 0…15` are many parts in one, those of tp 1 and in it of fsdp 0 to 15. The hue is a rank's place along the
outermost split, the shade that along the next; the mesh has the same colours.

- *claimed* is by the placements, *held* is where the ids really are. In the *difference*, what is right is grey, and
  `a→b` is a block that a should hold and b does. `tp=0: ✗ fsdp=127` is a block of which only that part is wrong.
- The lines below name the ranks that should hold the element under the cursor, and those that do; the mouse asks about
  any other.
- Zoomed all the way in, each number is an element, counted row by row from 0.
- Of a tensor with more than two dims, two are drawn, at one place of the others.
"""

    BINDINGS: ClassVar[list[BindingType]] = [
        *arrows("map", "move", "Move the cursor one cell {}"),
        *arrows("map", "jump", "Move the cursor one block {}", modifier="shift+"),
        *keys(
            "map",
            [
                ("plus,equals_sign", "zoom(1)", "Zoom in", "Show fewer indices, larger"),
                ("minus", "zoom(-1)", "Zoom out", "Show more indices, smaller"),
            ],
            show=True,
        ),
        *keys(
            "map",
            [
                ("0", "fit", "Whole tensor", "Show the whole tensor"),
                ("pageup", "page(-1)", "Page up", "A screenful up"),
                ("pagedown", "page(1)", "Page down", "A screenful down"),
                ("home", "end(0)", "First", "To the first element"),
                ("end", "end(-1)", "Last", "To the last element"),
            ],
        ),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sides: Sides | None = None
        self.side: Side = "claimed"
        self.suffix = ""
        self.place: tuple[int, ...] = ()
        self.lit: int | None = None
        self.zoom: Zoom | None = None
        self.level = 0
        self._view: tuple[object, _Viewport] | None = None
        self._frame: Frame | None = None
        self._hovered: tuple[int, ...] | None = None
        self.describe: Callable[[tuple[int, ...]], str] | None = None
        """Says who has the element under the mouse; by default its ranks."""

    def show(
        self, sides: Sides | None, side: Side, plane: Plane | None, suffix: str = "", lit: int | None = None
    ) -> None:
        """Show one side of a tensor on a plane; zoom and cursor stay where the tensor does."""
        drawn = self.zoom.plane if self.zoom else None
        same_plane = plane is not None and drawn is not None and _dims(plane) == _dims(drawn)
        if sides is self.sides and same_plane and (side, suffix, lit) == (self.side, self.suffix, self.lit):
            if plane is not None and plane.at != self.place:
                self._move_to(plane.at)
            return
        if sides is not self.sides or not same_plane:
            self.level = 0
        self.sides, self.side, self.suffix, self.lit = sides, side, suffix, lit
        self.place = plane.at if plane else ()
        self.zoom = Zoom(sides, plane, side) if sides and plane and all(sides.holders.shape) else None
        self._layout_map()
        self._scroll_to_cursor()

    @property
    def frame(self) -> Frame | None:
        """The drawing; None where there is nothing to draw."""
        if self.sides is None or self.zoom is None:
            return None
        rows, cols, ids = self.zoom.rulers(self.level, *self._room)
        return Frame(self.sides, self.side, self.zoom.plane, rows, cols, ids, self.suffix, self.lit)

    @property
    def _gutter(self) -> int:
        return len(str(self.zoom.height)) + 1 if self.zoom else 0

    @property
    def _room(self) -> tuple[int, int]:
        return max(self.room.height - HEADER, 1), max(self.room.width - self._gutter, 1)

    def _layout_map(self) -> None:
        frame = self.frame
        width, height = (frame.cols.extent, frame.rows.extent) if frame else (0, 0)
        self.virtual_size = Size(self._gutter + width, HEADER + height)
        self.refresh()

    def fit(self) -> None:
        """Fit the map into its new room."""
        self._layout_map()
        self._scroll_to_cursor()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Paint some lines of one frame."""
        self._frame = self.frame
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Paint one line of the screen."""
        frame = self._frame
        if frame is None:
            return self.blank
        left, top = self.scroll_offset
        if y < HEADER:
            at = self.place[frame.plane.cols]
            return self.strip_of(column_names(frame, at, left, self._room[1], self._gutter, self.base))
        view, line = self._viewport(frame, top, left), y - HEADER
        if line >= len(view.chars):
            return self._end(frame) if top + line == frame.rows.extent and not frame.rows.lines else self.blank
        at = self.place[frame.plane.rows]
        name, here = row_name(frame, at, top + line, view.rows[line], every=self.level > 0)
        gutter = Segment(name.rjust(self._gutter - 1) + " ", self.base + (BOLD if here else DIM))
        return self.strip_of([gutter, *self._segments(frame, view, line, left)])

    def _end(self, frame: Frame) -> Strip:
        """Name the end of the rows below them, where no line is drawn that could carry it."""
        name = str(frame.rows.size) if frame.rows.size > 1 else ""
        return self.strip_of([Segment(name.rjust(self._gutter - 1) + " ", self.base + DIM)])

    def _viewport(self, frame: Frame, top: int, left: int) -> _Viewport:
        """Return the painted cells on screen, painted once until something else is shown there."""
        elsewhere = [at for dim, at in enumerate(self.place) if dim not in _dims(frame.plane)]
        drawn = (self.side, self.suffix, self.lit, _dims(frame.plane), elsewhere, self.level)
        key = (self.sides, *drawn, self.size, top, left, self.base, self.palette)
        if self._view is None or self._view[0] != key:
            painted = paint(frame, top, left, *self._room)
            rows = [(start, stop) for start, stop in frame.rows.spans(top, self._room[0]).tolist()]
            self._view = (key, _Viewport(painted.chars, rows, self._stretches(painted)))
        return self._view[1]

    def _stretches(self, painted: Painted) -> list[list[tuple[int, Style]]]:
        """Join neighbours that look alike; LINE and OUTSIDE count from the end of the styles."""
        behind = self.background_colors[1].hex
        looks = [block_style(look, behind, self.palette) for look in painted.of]
        numbers: dict[Style, int] = {}
        number_of = [numbers.setdefault(style, len(numbers)) for style in (*looks, self.base + DIM, self.base)]
        codes, styles = np.array(number_of, np.int64)[painted.looks], list(numbers)
        stretches = [[(0, styles[code])] for code in codes[:, :1].ravel().tolist()]
        rows, columns = np.nonzero(codes[:, 1:] != codes[:, :-1])
        for row, column, code in zip(rows.tolist(), columns.tolist(), codes[rows, columns + 1].tolist(), strict=True):
            stretches[row].append((column + 1, styles[code]))
        return stretches

    def _segments(self, frame: Frame, view: _Viewport, line: int, left: int) -> list[Segment]:
        """Write the stretches of a line, with the cursor on its columns."""
        text = view.chars[line]
        low, high = self._cursor_columns(frame, view.rows[line], left)
        covered = low, min(high, len(text))
        is_pointed = high - low >= CURSOR_LEAST and not frame.ids and not cuts_label(text, covered)
        text = pointed_at(text, covered) if is_pointed else text
        segments, stretches = [], view.stretches[line]
        for (start, style), (stop, _) in zip(stretches, [*stretches[1:], (len(text), None)], strict=True):
            for begin, end in pairwise(sorted({start, stop, *(at for at in covered if start < at < stop)})):
                segments.append(
                    Segment(text[begin:end], self._chosen(style, is_pointed) if low <= begin < high else style)
                )
        return segments

    def _chosen(self, style: Style, is_pointed: bool) -> Style:
        """Return the style of the cursor's cells: the block's own in bold, or the screen's own colours exchanged."""
        if is_pointed or self.base.color is None or self.base.bgcolor is None:
            return style + (BOLD if is_pointed else REVERSE)
        return Style(color=self.base.bgcolor, bgcolor=self.base.color, bold=True)

    def _cursor_columns(self, frame: Frame, span: tuple[int, int], left: int) -> tuple[int, int]:
        """Return the columns of the screen that the cursor covers on a row of the map; none is (-1, -1)."""
        if not span[0] <= self.place[frame.plane.rows] < span[1]:
            return -1, -1
        at = self.place[frame.plane.cols]
        begin = frame.cols.cell_of(at) - left
        return max(begin, 0), max(begin + frame.cols.cells_of(at), 0)

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor by cells of the screen."""
        if self.zoom and (frame := self.frame):
            self.go(self.zoom.moved(frame, self.place, down, right))

    def action_page(self, step: int) -> None:
        """Move the cursor by a screenful of rows."""
        if self.zoom and (frame := self.frame):
            row = self.zoom.paged(frame, self.place, step * max(self._room[0] - 1, 1))
            place = list(self.place)
            place[frame.plane.rows] = row
            self.go(tuple(place))

    def action_end(self, index: int) -> None:
        """Move the cursor to the first or the last element of the drawn plane."""
        if self.zoom:
            place, plane = list(self.place), self.zoom.plane
            place[plane.rows], place[plane.cols] = index % self.zoom.height, index % self.zoom.width
            self.go(tuple(place))

    def action_jump(self, down: int, right: int) -> None:
        """Move the cursor by blocks."""
        if self.zoom:
            self.go(self.zoom.jumped(self.place, down, right))

    def action_zoom(self, step: int) -> None:
        """Zoom in or out by a factor of two, around the cursor."""
        self.zoom_to(self.level + step)
        self.post_message(Zoomed(self.level))

    def action_fit(self) -> None:
        """Show the whole tensor."""
        self.zoom_to(0)
        self.post_message(Zoomed(0))

    def zoom_to(self, level: int) -> None:
        """Zoom to a level, or as near to it as there is one, around the cursor."""
        if self.zoom is not None:
            self.level = min(max(level, 0), self.zoom.deepest(*self._room))
            self._layout_map()
            self._scroll_to_cursor(center=True)

    def go(self, place: tuple[int, ...]) -> None:
        """Put the cursor on an element, bring it into view, and say so."""
        if self.zoom is not None:
            self._move_to(place)
            self.post_message(PlaceChosen(place))

    def _move_to(self, place: tuple[int, ...]) -> None:
        """Move the cursor."""
        if self.zoom is None:
            return
        plane = replace(self.zoom.plane, at=place)
        self.zoom, self.place = replace(self.zoom, plane=plane), place
        self._scroll_to_cursor()
        self.refresh()

    def block(self) -> list[tuple[int, int]] | None:
        """Return the index ranges of the block under the cursor, one per dim."""
        return self.zoom.block(self.place) if self.zoom else None

    def _scroll_to_cursor(self, *, center: bool = False) -> None:
        if (frame := self.frame) is None:
            return
        x = frame.cols.cell_of(self.place[frame.plane.cols])
        y = frame.rows.cell_of(self.place[frame.plane.rows])
        height, width = self._room
        wide = frame.cols.cells_of(self.place[frame.plane.cols])
        box = Region(x - 1, y - 1, wide + 2 + self._gutter, 3 + HEADER)
        if center:
            self.scroll_to(x - width // 2, y - height // 2, animate=False)
        else:
            self.bring_into_view(box)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        if (place := self.place_at(event.x, event.y)) is not None:
            self.go(place)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Say who holds the element under the mouse."""
        place = self.place_at(event.x, event.y)
        if place is None or self.sides is None:
            self.tooltip = None
        elif place != self._hovered:
            self.tooltip = Text(self.describe(place) if self.describe else hovered(self.sides, place, place))
        self._hovered = place

    def place_at(self, x: int, y: int) -> tuple[int, ...] | None:
        """Return the element at a column and a line of the screen; None beside the map."""
        frame = self.frame
        if frame is None or not self.zoom:
            return None
        left, top = self.scroll_offset
        row = frame.rows.spans(y - HEADER + top, 1)
        col = frame.cols.spans(x - self._gutter + left, 1)
        if y < HEADER or x < self._gutter or not len(row) or not len(col):
            return None
        place = list(self.place)
        place[frame.plane.rows] = min(int(row[0, 0]), self.zoom.height - 1)
        place[frame.plane.cols] = min(int(col[0, 0]), self.zoom.width - 1)
        return tuple(place)
