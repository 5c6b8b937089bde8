"""The numbers of one local tensor as they lie in memory; only those on screen are formatted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from textual.geometry import Size

from .grid import DIM, Grid

if TYPE_CHECKING:
    from textual.strip import Strip

    from ..model.memory import Memory

SAMPLE = 64
"""How many rows and columns decide the width of a column."""


class ValuesGrid(Grid):
    """A local tensor's ids or values in columns of one width, under its local indices."""

    HELP = """\
## The rank's memory

The local tensor, row by row; the last dim runs to the right. The numbers on the left and above are local indices.
**v** switches between ids (which say where each element came from) and the model's own values, if the dump has them.
"""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.memory: Memory | None = None
        self._cell = 1
        self._gutter = 0

    def show(self, memory: Memory | None) -> None:
        """Show numbers."""
        self.memory = memory
        if memory is not None and memory.num_rows and memory.num_columns:
            ends = {0, memory.num_rows - 1, *range(min(SAMPLE, memory.num_rows))}
            last = max(memory.num_columns - SAMPLE, 0)
            samples = [text for row in ends for begin in (0, last) for text in memory.row(row, begin, SAMPLE)]
            self._cell = max(len(str(memory.num_columns - 1)), *map(len, samples)) + 1
            self._gutter = max(map(len, map(memory.row_title, ends))) + 1
            self.extend(Size(self._gutter + self._cell * memory.num_columns, memory.num_rows + 1))
        self.scroll_to(0, 0, animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Write one line of the screen."""
        memory, width = self.memory, self.size.width
        left, top = self.scroll_offset
        row = y - 1 + top
        if memory is None or not memory.num_columns or row >= memory.num_rows:
            return self.blank
        first, count = left // self._cell, (width - self._gutter) // self._cell + 2
        if y == 0:
            numbers = [str(col) for col in range(first, min(first + count, memory.num_columns))]
        else:
            numbers = memory.row(row, first, count)
        text = "".join(number.rjust(self._cell) for number in numbers)[left % self._cell :]
        dim = self.base + DIM
        head = Segment((memory.row_title(row) if y else "").rjust(self._gutter), dim)
        return self.strip_of([head, Segment(text, self.base if y else dim)])
