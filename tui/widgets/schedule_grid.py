"""A pipeline's schedule: one line per rank, time to the right; only the part on screen is painted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size

from shardviz.dump.costs.timeline import duration
from shardviz.picture.model.palette import rank_color

from ..colors import rank_style
from ..keys import arrows, keys
from ..model.selection import PassChosen
from .grid import BOLD, DIM, Grid

if TYPE_CHECKING:
    from textual import events
    from textual.strip import Strip

    from shardviz.dump.costs.timeline import Timeline
    from shardviz.dump.records.step import StageRecord
    from shardviz.layout.mesh import Mesh


LEGEND = "a0 forward of micro-batch 0 through the first stage, b0 the second  A0=== backward  · idle"
CURSOR = Style(reverse=True, bold=True)
SAME = Style(underline=True, bold=True)
"""The passes of the micro-batch that the cursor is on, so that its way through the stages shows."""


class ScheduleGrid(Grid):
    """Forward and backward passes as cells to scale in time, one line per rank, with a cursor on one pass."""

    HELP = """\
## The pipeline

One line per rank, time to the right. `a3` is the forward pass of micro-batch 3 through the rank's first stage (`b3`
through its second), `A3` is the backward pass, which counts as twice as long; `·` is a rank with nothing to do.
The order on each rank is the real one; each pass begins as early as it could. The way of the chosen micro-batch
through the stages is underlined.
"""

    BINDINGS = keys(
        "schedule",
        hidden=[
            *arrows("move", "To the next pass {}"),
            ("home", "end(0)", "First", "To the rank's first pass"),
            ("end", "end(-1)", "Last", "To the rank's last pass"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.timeline: Timeline | None = None
        self._mesh: Mesh | None = None
        self.row = self.at = 0
        self._ranks: list[int] = []
        self._cell = self._gutter = 1

    def show(self, times: Timeline | None, mesh: Mesh) -> None:
        """Show a schedule of ranks of a mesh."""
        if times is self.timeline:
            return
        self._mesh = mesh
        self.timeline, self.row, self.at = times, 0, 0
        if times is not None:
            self._ranks = list(times.begins)
            self._gutter = len(f"rank {max(self._ranks)}") + 1
            self.styles.height = len(self._ranks)
        self.fit()

    def fit(self) -> None:
        """Leave a space between passes where there is room for it."""
        if (times := self.timeline) is not None:
            self._cell = 1 + len(str(times.num_microbatches - 1))
            self._cell += self._gutter + (self._cell + 1) * times.length <= self.room.width
            self.virtual_size = Size(self._gutter + self._cell * times.length, len(self._ranks))
        self.refresh()

    @property
    def rank(self) -> int:
        """The rank that the cursor is on."""
        return self._ranks[self.row]

    @property
    def chosen(self) -> tuple[StageRecord, int] | None:
        """The pass under the cursor, and the time at which it begins."""
        passes = self.timeline.begins[self.rank] if self.timeline else ()
        return passes[min(self.at, len(passes) - 1)] if passes else None

    def render_line(self, y: int) -> Strip:
        """Paint the line of one rank."""
        left, top = self.scroll_offset
        row = y + top
        if self.timeline is None or row >= len(self._ranks):
            return self.blank
        name = Segment(f"rank {self._ranks[row]}".ljust(self._gutter), self.base + (BOLD if row == self.row else DIM))
        return self.strip_of([name, *self._cells(self.timeline, row, left)])

    def _cells(self, times: Timeline, row: int, left: int) -> list[Segment]:
        """Paint the passes of a rank and the gaps between them, as far as they are on screen."""
        rank, end = self._ranks[row], left + self.size.width - self._gutter
        passes = times.begins[rank]
        segments, at = [], left
        for record, begin in [*passes, (None, times.length)]:
            first = begin * self._cell
            if at < min(first, end):
                dots = "".join("·" if column % self._cell == 0 else " " for column in range(at, min(first, end)))
                segments.append(Segment(dots, self.base + DIM))
                at = min(first, end)
            if record is None or at >= end:
                break
            width = duration(record) * self._cell
            if (last := first + width) > at:
                name = times.label(rank, record)
                text = f"{name.ljust(width - (width > len(name)), '=') if record.backward else name:<{width}}"
                segments.append(Segment(text[at - first : min(last, end) - first], self._style(row, rank, record)))
                at = min(last, end)
        return segments

    def _style(self, row: int, rank: int, record: StageRecord) -> Style:
        style = rank_style(rank_color(rank, self._mesh), self.palette)
        chosen = self.chosen
        if chosen is None or record.microbatch != chosen[0].microbatch:
            return style
        return style + (CURSOR if row == self.row and record is chosen[0] else SAME)

    def action_move(self, down: int, right: int) -> None:
        """Go to another rank, to what it does at that time, or to the pass before or after."""
        chosen = self.chosen
        if self.timeline is None or chosen is None:
            return
        if down:
            self.row = min(max(self.row + down, 0), len(self._ranks) - 1)
            self.at = _at(self.timeline.begins[self.rank], chosen[1])
        else:
            self._go(self.at + right)
        self._say()

    def action_end(self, index: int) -> None:
        """Go to the rank's first or last pass."""
        if self.timeline is not None:
            self._go(index % max(len(self.timeline.begins[self.rank]), 1))
            self._say()

    def _go(self, at: int) -> None:
        if self.timeline is not None:
            self.at = min(max(at, 0), max(len(self.timeline.begins[self.rank]) - 1, 0))

    def _say(self) -> None:
        """Show the cursor, and post the pass that it is on."""
        if (chosen := self.chosen) is not None:
            box = Region(chosen[1] * self._cell, self.row, duration(chosen[0]) * self._cell + self._gutter, 1)
            self.bring_into_view(box)
            self.refresh()
            self.post_message(PassChosen(self.rank, *chosen))

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse."""
        left, top = self.scroll_offset
        row = event.y + top
        if self.timeline is not None and row < len(self._ranks) and event.x >= self._gutter:
            self.row = row
            self.at = _at(self.timeline.begins[self.rank], (event.x - self._gutter + left) // self._cell)
            self._say()


def pipeline_text(times: Timeline | None) -> str:
    """Write the title of a schedule: its sizes, and the bubble compared with the closed formula."""
    if times is None:
        return "Pipeline"
    stages = f" × {times.stages_per_rank} stages" if times.stages_per_rank > 1 else ""
    return (
        f"Pipeline of {len(times.begins)} ranks{stages}, {times.num_microbatches} micro-batches: "
        f"idle {times.bubble:.1%}, by the formula {times.formula:.1%}"
    )


def pass_text(rank: int, record: StageRecord, begin: int) -> str:
    """Describe one pass."""
    way = "backward" if record.backward else "forward"
    end = begin + duration(record)
    return f"rank {rank}  stage {record.stage}, micro-batch {record.microbatch} {way}, from {begin} to {end}"


def _at(passes: tuple[tuple[StageRecord, int], ...], time: int) -> int:
    """Return the last pass that has begun at a time."""
    return max(sum(begin <= time for _, begin in passes) - 1, 0)
