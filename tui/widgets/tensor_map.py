"""The map of one tensor: blocks to scale, with a cursor on one element, zoomed and scrolled without limit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shardviz.picture.paint import LINE, Frame, Painted, paint

from ..colours import block_style
from ..messages import PlaceChosen, Zoomed
from ..zoom import Zoom

if TYPE_CHECKING:
    from textual import events

    from shardviz.picture.holders import Plane
    from shardviz.picture.paint import Side
    from shardviz.picture.sides import Sides

HEADER = 1


class TensorMap(ScrollView, can_focus=True):
    """The map. `HELP` is what F1 says of it."""

    HELP = """\
## The map

The tensor to scale: rows downwards, columns to the right. A block is written over with the ranks that hold it.

- **v** goes from *claimed* (what the placements say) to *held* (where the ids really are) to *difference*.
  In the difference, `1→4` is a block that the placements put on rank 1 and that is on rank 4.
- **arrows** move the cursor a cell, **shift+arrows** a block; the line below says who holds the element.
- **+** and **-** zoom down to single ids and back, **0** shows all. **g** goes to an index.
- **x** chooses the next two dims of a tensor that has more than two, **[** and **]** step through the others.
"""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1, 0)", "Up", show=False, id="map.up", tooltip="Move the cursor a cell up"),
        Binding("down", "move(1, 0)", "Down", show=False, id="map.down", tooltip="Move the cursor a cell down"),
        Binding("left", "move(0, -1)", "Left", show=False, id="map.left", tooltip="Move the cursor a cell left"),
        Binding("right", "move(0, 1)", "Right", show=False, id="map.right", tooltip="Move the cursor a cell right"),
        Binding("shift+up", "jump(-1, 0)", "Block up", show=False, id="map.block_up", tooltip="To the block above"),
        Binding(
            "shift+down", "jump(1, 0)", "Block down", show=False, id="map.block_down", tooltip="To the block below"
        ),
        Binding(
            "shift+left", "jump(0, -1)", "Block left", show=False, id="map.block_left", tooltip="To the block left"
        ),
        Binding(
            "shift+right", "jump(0, 1)", "Block right", show=False, id="map.block_right", tooltip="To the next block"
        ),
        Binding(
            "plus,equals_sign",
            "zoom(1)",
            "Zoom",
            key_display="+",
            id="map.zoom_in",
            tooltip="Show fewer indices, larger",
        ),
        Binding("minus", "zoom(-1)", "Out", key_display="-", id="map.zoom_out", tooltip="Show more indices, smaller"),
        Binding("0", "fit", "All", show=False, id="map.fit", tooltip="Show the whole tensor"),
    ]

    DEFAULT_CSS = "TensorMap { background: $surface; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sides: Sides | None = None
        self.side: Side = "claimed"
        self.suffix = ""
        self.place: tuple[int, ...] = ()
        self.lit: int | None = None
        self.zoom: Zoom | None = None
        self.level = 0
        self._painted: tuple[object, Painted] | None = None

    def show(
        self, sides: Sides | None, side: Side, plane: Plane | None, suffix: str = "", lit: int | None = None
    ) -> None:
        """Show one side of a tensor on a plane; zoom and cursor stay where the tensor does."""
        shown = self.zoom.plane if self.zoom else None
        if sides is not self.sides or not (plane and shown) or (plane.rows, plane.cols) != (shown.rows, shown.cols):
            self.level = 0
        self.place = plane.at if plane else ()
        self.sides, self.side, self.suffix, self.lit = sides, side, suffix, lit
        self.zoom = Zoom(sides.holders, plane) if sides and plane and all(sides.holders.shape) else None
        self._layout_map()

    @property
    def frame(self) -> Frame | None:
        """What is drawn; None where there is nothing to draw."""
        if self.sides is None or self.zoom is None:
            return None
        rows, cols, ids = self.zoom.rulers(self.level, *self._room)
        return Frame(self.sides, self.side, self.zoom.plane, rows, cols, ids, self.suffix, self.lit)

    @property
    def _gutter(self) -> int:
        return len(str(self.zoom.height)) + 1 if self.zoom else 0

    @property
    def _room(self) -> tuple[int, int]:
        return max(self.size.height - HEADER, 1), max(self.size.width - self._gutter, 1)

    def _layout_map(self) -> None:
        frame = self.frame
        width, height = (frame.cols.extent, frame.rows.extent) if frame else (0, 0)
        self.virtual_size = Size(self._gutter + width, HEADER + height)
        self._painted = None
        self.refresh()

    def on_resize(self) -> None:
        """Fit the map into its new room."""
        self._layout_map()

    def render_line(self, y: int) -> Strip:
        """Paint one line of the screen."""
        frame = self.frame
        if frame is None:
            return Strip.blank(self.size.width, self.rich_style)
        left, top = self.scroll_offset
        if y < HEADER:
            return self._header(frame, left)
        painted = self._paint(frame, top, left)
        line = y - HEADER
        if line >= len(painted.chars):
            return Strip.blank(self.size.width, self.rich_style)
        ruled = "─" in painted.chars[line]
        segments = [
            self._gutter_segment(frame, top + line, ruled=ruled),
            *self._segments(frame, painted, line, top, left),
        ]
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def _paint(self, frame: Frame, top: int, left: int) -> Painted:
        key = (self.level, self.side, self.size, top, left)
        if self._painted is None or self._painted[0] != key:
            self._painted = (key, paint(frame, top, left, *self._room))
        return self._painted[1]

    def _segments(self, frame: Frame, painted: Painted, line: int, top: int, left: int) -> list[Segment]:
        text, looks = painted.chars[line], painted.looks[line].tolist()
        background = self.background_colors[1].hex
        styles = [block_style(look, background) for look in painted.of]
        low, high = self._cursor_columns(frame, top + line, left)
        segments, start = [], 0
        for x in range(1, len(text) + 1):
            if x < len(text) and looks[x] == looks[start] and x not in (low, high):
                continue
            style = styles[looks[start]] if looks[start] >= 0 else self._line_style(looks[start])
            if low <= start < high:
                style += Style(reverse=True, bold=True)
            segments.append(Segment(text[start:x], style))
            start = x
        return segments

    def _line_style(self, look: int) -> Style:
        return self.rich_style + Style(dim=True) if look == LINE else self.rich_style

    def _cursor_columns(self, frame: Frame, row: int, left: int) -> tuple[int, int]:
        """Return the columns of the screen that the cursor covers on a row of the map; none is (-1, -1)."""
        spans = frame.rows.spans(row, 1)
        at = self.place[frame.plane.rows]
        if not len(spans) or not spans[0, 0] <= at < spans[0, 1]:
            return -1, -1
        begin = frame.cols.cell_of(self.place[frame.plane.cols]) - left
        return max(begin, 0), max(begin + frame.cols.cells, 0)

    def _gutter_segment(self, frame: Frame, row: int, *, ruled: bool) -> Segment:
        """Name the row of a line that is drawn, and all rows where there are none; the cursor's is bold."""
        start, stop = frame.rows.spans(row, 1)[0].tolist()
        at = self.place[frame.plane.rows]
        begins = at in frame.rows.edges if frame.rows.lines else False
        here = start == stop == at and ruled if begins else row == frame.rows.cell_of(at)
        named = ruled if start == stop else frame.ids or not frame.rows.lines or self.level > 0
        text = str(at) if here else str(start) if named else ""
        style = self.rich_style + (Style(bold=True) if here else Style(dim=True))
        return Segment(text.rjust(self._gutter - 1) + " ", style)

    def _header(self, frame: Frame, left: int) -> Strip:
        width = self._room[1]
        line, free = [" "] * width, 0
        here = self.place[frame.plane.cols]
        spans = frame.cols.spans(left, width).tolist()
        for x, (start, stop) in enumerate(spans):
            named = (
                start == stop or (x and spans[x - 1] != [start, stop] and (frame.ids or not frame.cols.lines)) or x == 0
            )
            text = str(start)
            if named and x >= free and x + len(text) <= width:
                line[x : x + len(text)] = list(text)
                free = x + len(text) + 1
        at = frame.cols.cell_of(here) - left
        segments = [Segment(" " * self._gutter + "".join(line), self.rich_style + Style(dim=True))]
        strip = Strip(segments).adjust_cell_length(self.size.width, self.rich_style)
        if 0 <= at <= width - len(str(here)):
            bold = Strip([Segment(f" {here} "[0 if at else 1 :], self.rich_style + Style(bold=True))])
            begin = self._gutter + max(at - 1, 0)
            strip = Strip.join([strip.crop(0, begin), bold, strip.crop(begin + bold.cell_length)])
        return strip.crop(0, self.size.width)

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor by cells of the screen."""
        if self.zoom and (frame := self.frame):
            self.go(self.zoom.moved(frame, self.place, down, right))

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
        """Put the cursor on an element and bring it into view."""
        if self.zoom is None:
            return
        plane = replace(self.zoom.plane, at=place)
        if any(plane.at[dim] != self.place[dim] for dim in range(len(place)) if dim not in (plane.rows, plane.cols)):
            self._painted = None
        self.zoom, self.place = replace(self.zoom, plane=plane), place
        self._scroll_to_cursor()
        self.refresh()
        self.post_message(PlaceChosen(place))

    def block(self) -> list[tuple[int, int]] | None:
        """Return the index ranges of the block under the cursor, a range a dim."""
        return self.zoom.block(self.place) if self.zoom else None

    def _scroll_to_cursor(self, *, center: bool = False) -> None:
        if (frame := self.frame) is None:
            return
        x = frame.cols.cell_of(self.place[frame.plane.cols])
        y = frame.rows.cell_of(self.place[frame.plane.rows])
        height, width = self._room
        box = Region(x - 1, y - 1, frame.cols.cells + 2 + self._gutter, 3 + HEADER)
        if center:
            self.scroll_to(x - width // 2, y - height // 2, animate=False)
        else:
            self.scroll_to_region(box, animate=False, force=True)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        frame = self.frame
        if frame is None or not self.zoom:
            return
        left, top = self.scroll_offset
        row = frame.rows.spans(event.y - HEADER + top, 1)
        col = frame.cols.spans(event.x - self._gutter + left, 1)
        if event.y >= HEADER and event.x >= self._gutter and len(row) and len(col):
            place = list(self.place)
            place[frame.plane.rows] = min(int(row[0, 0]), self.zoom.height - 1)
            place[frame.plane.cols] = min(int(col[0, 0]), self.zoom.width - 1)
            self.go(tuple(place))
