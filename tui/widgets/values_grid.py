"""The numbers of one local tensor as they lie in memory beside those that they should be, made only if on screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size

from shardviz.picture.model.palette import VERMILLION, WRONG

from ..colors import ink
from .grid import DIM, Grid

if TYPE_CHECKING:
    from textual.strip import Strip

    from ..model.rank import Beside, Memory


SAMPLE = 64
"""How many rows decide the width of their titles."""

HEADS = 2
"""Lines above the numbers: what they are, and the local indices of columns."""

BETWEEN = " │ "
CURSOR = Style(reverse=True, bold=True)


class ValuesGrid(Grid):
    """A local tensor's elements or values in columns of one width, under its local indices, and beside what is due."""

    HELP = """\
## The rank's memory

The local tensor, row by row; the last dim runs to the right. The numbers on the left and above are local indices.

The elements are those of the whole tensor: `6,0` in row 0 and column 2 says that this rank keeps element [6, 0] there.
On the left is what the placements claim, on the right what the rank holds; `✗` marks each that is another one.
Instead of elements there are the model's own values, if the dump has them, beside those of another copy: of one that
differs, if any does.
"""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.beside: Beside | None = None
        self._cell = 1
        self._gutter = 0

    def show(self, beside: Beside | None) -> None:
        """Show numbers, and scroll to the chosen one."""
        self.beside = beside
        self.scroll_to(0, 0, animate=False)
        if beside is not None and beside.memory.num_rows and beside.memory.num_columns:
            memories = [beside.memory, *([beside.due] if beside.due else [])]
            self._cell = max(memory.width for memory in memories) + 2
            self._cell = max(self._cell, len(str(beside.memory.num_columns - 1)) + 1)
            ends = {0, beside.memory.num_rows - 1, *range(min(SAMPLE, beside.memory.num_rows))}
            self._gutter = max(map(len, map(beside.memory.row_title, ends))) + 1
            self.fit()
        self.refresh()

    @property
    def _half(self) -> int:
        """The columns that the numbers have, or those that they are compared with."""
        room = self.room.width - self.scrollbar_size_vertical - self._gutter
        if self.beside and self.beside.due:
            room = (room - len(BETWEEN)) // 2
        return max(room // self._cell, 1) * self._cell

    def fit(self) -> None:
        """Fit the numbers into their room: both halves scroll together."""
        if self.beside is None or not self.room:
            return
        memory = self.beside.memory
        beyond = max(self._cell * memory.num_columns - self._half, 0)
        width = self.room.width - self.scrollbar_size_vertical
        self.virtual_size = Size(width + beyond if beyond else 0, memory.num_rows + HEADS)
        self.scroll_to_cursor()

    def scroll_to_cursor(self) -> None:
        """Scroll as far as is needed to show the chosen number in its half."""
        if self.beside is None or self.beside.cursor is None:
            return
        (row, column), (left, top) = self.beside.cursor, self.scroll_offset
        begin, height = column * self._cell, max(self.size.height - HEADS - 1, 1)
        left = min(max(left, begin + self._cell - self._half), begin)
        top = min(max(top, row + 1 - height), row)
        if (left, top) != self.scroll_offset:
            self.scroll_to(left, top, animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        """Write one line of the screen."""
        beside, (left, top) = self.beside, self.scroll_offset
        row = y - HEADS + top
        if beside is None or not beside.memory.num_columns or row >= beside.memory.num_rows:
            return self.blank
        memory, due = beside.memory, beside.due
        if y < HEADS:
            heads = [self._head(half, y, left) for half in (*([due] if due else []), memory)]
            return self.strip_of([Segment(" " * self._gutter + BETWEEN.join(heads), self.base + DIM)])
        first, count = left // self._cell, self._half // self._cell + 2
        marks = beside.wrong(row, first, count)
        line = [Segment(memory.row_title(row).rjust(self._gutter), self.base + DIM)]
        if due is not None:
            line += [*self._numbers(due, row, [], self.base + DIM), Segment(BETWEEN, self.base + DIM)]
        return self.strip_of([*line, *self._numbers(memory, row, marks, self.base + ink(VERMILLION, bold=True))])

    def _head(self, memory: Memory, line: int, left: int) -> str:
        if not line:
            return memory.title[: self._half].ljust(self._half)
        first = left // self._cell
        stop = min(first + self._half // self._cell + 2, memory.num_columns)
        text = "".join(str(column).rjust(self._cell) for column in range(first, stop))
        return text[left % self._cell :][: self._half].ljust(self._half)

    def _numbers(self, memory: Memory, row: int, marks: list[bool], marked: Style) -> list[Segment]:
        """Write a row's numbers that are on screen, cut at both ends."""
        assert self.beside is not None
        left = self.scroll_offset.x
        first, count = left // self._cell, self._half // self._cell + 2
        cursor = self.beside.cursor if memory is self.beside.memory else None
        segments, skip, room = list[Segment](), left % self._cell, self._half
        for at, number in enumerate(memory.row(row, first, count)):
            is_wrong = at < len(marks) and marks[at]
            text = f"{WRONG if is_wrong else ''}{number}".rjust(self._cell)[skip:][:room]
            style = marked if is_wrong else self.base
            segments.append(Segment(text, style + CURSOR if cursor == (row, first + at) else style))
            room, skip = room - len(text), 0
        return [*segments, Segment(" " * room, self.base)]
