"""All ranks by their coordinates; and everything that one rank holds, with its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.text import Text
from textual import on
from textual.containers import Vertical
from textual.geometry import Size
from textual.reactive import var
from textual.widgets import Static

from shardviz.dump.records.base import WEIGHTS
from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.palette import VERMILLION, WRONG
from shardviz.text import bytes_text, counted, printable

from ..colors import ink, verdict_style
from ..keys import keys
from ..model.names import LEAST_NAME, fitted
from ..model.rank import ids_beside, part_text, size_text, values_beside
from ..model.selection import TensorOpened, name_of, rank_of
from ..model.tree import after, errors_first
from ..widgets.frame import Box, ScrollBox
from ..widgets.grid import CHOSEN, DIM, Grid
from ..widgets.listing import SEARCHING, TO_TREE, Listing, Searching, TensorTree
from ..widgets.mesh_grid import LEGEND, MeshGrid, drawn_side, lights_of
from ..widgets.tensor_map import TensorMap
from .view import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.style import Style
    from textual.app import ComposeResult
    from textual.strip import Strip

    from shardviz.picture.text.paint import Side

    from ..model.document import Document
    from ..model.rank import Beside, Memory
    from ..model.selection import Selection
    from ..model.tree import Node, TreeLine


SAMPLE = 64
"""How many rows decide the width of their titles."""

HEADS = 2
"""Lines above the numbers: what they are, and the local indices of columns."""

BETWEEN = " │ "


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

    shown: Beside | None = None
    _cell, _gutter = 1, 0

    def show(self, shown: Beside | None) -> None:
        """Show numbers, and scroll to the chosen one."""
        self.shown = shown
        self.scroll_to(0, 0, animate=False)
        if shown is not None and shown.memory.num_rows and shown.memory.num_columns:
            memories = [shown.memory, *([shown.due] if shown.due else [])]
            self._cell = max(memory.width for memory in memories) + 2
            self._cell = max(self._cell, len(str(shown.memory.num_columns - 1)) + 1)
            ends = {0, shown.memory.num_rows - 1, *range(min(SAMPLE, shown.memory.num_rows))}
            self._gutter = max(map(len, map(shown.memory.row_title, ends))) + 1
            self.fit()
        self.refresh()

    @property
    def _half(self) -> int:
        """The columns that the numbers have, or those that they are compared with."""
        room = self.room.width - self.scrollbar_size_vertical - self._gutter
        if self.shown and self.shown.due:
            room = (room - len(BETWEEN)) // 2
        return max(room // self._cell, 1) * self._cell

    def fit(self) -> None:
        """Fit the numbers into their room: both halves scroll together."""
        if self.shown is None or not self.room:
            return
        memory = self.shown.memory
        beyond = max(self._cell * memory.num_columns - self._half, 0)
        width = self.room.width - self.scrollbar_size_vertical
        self.virtual_size = Size(width + beyond if beyond else 0, memory.num_rows + HEADS)
        self.scroll_to_cursor()

    def scroll_to_cursor(self) -> None:
        """Scroll as far as is needed to show the chosen number in its half."""
        if self.shown is None or self.shown.cursor is None:
            return
        (row, column), (left, top) = self.shown.cursor, self.scroll_offset
        begin, height = column * self._cell, max(self.size.height - HEADS - 1, 1)
        left = min(max(left, begin + self._cell - self._half), begin)
        top = min(max(top, row + 1 - height), row)
        if (left, top) != self.scroll_offset:
            self.scroll_to(left, top, animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        """Write one line of the screen."""
        shown, (left, top) = self.shown, self.scroll_offset
        row = y - HEADS + top
        if shown is None or not shown.memory.num_columns or row >= shown.memory.num_rows:
            return self.blank
        memory, due = shown.memory, shown.due
        if y < HEADS:
            heads = [self._head(half, y, left) for half in (*([due] if due else []), memory)]
            return self.strip_of([Segment(" " * self._gutter + BETWEEN.join(heads), self.base + DIM)])
        first, count = left // self._cell, self._half // self._cell + 2
        marks = shown.wrong(row, first, count)
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
        assert self.shown is not None
        left = self.scroll_offset.x
        first, count = left // self._cell, self._half // self._cell + 2
        cursor = self.shown.cursor if memory is self.shown.memory else None
        segments, skip, room = list[Segment](), left % self._cell, self._half
        for at, number in enumerate(memory.row(row, first, count)):
            is_wrong = at < len(marks) and marks[at]
            text = f"{WRONG if is_wrong else ''}{number}".rjust(self._cell)[skip:][:room]
            style = marked if is_wrong else self.base
            segments.append(Segment(text, style + CHOSEN if cursor == (row, first + at) else style))
            room, skip = room - len(text), 0
        return [*segments, Segment(" " * room, self.base)]


BESIDE_WEIGHTS = {"grad": "grads", "optim": "states", "activation": "activations"}
"""What else a rank's memory has, by role."""


def rank_text(document: Document, rank: int) -> Text:
    """Write the lines of a rank."""
    files = document.dump.files
    mesh = files.mesh
    text = Text.assemble((f"rank {rank}", "bold"), f" of {files.run.num_ranks:,}")
    if rank in files.ranks:
        held = [item for item in document.counted if rank in item.tensor.shards]
        count = sum(len(item.widths) for item in held if item.tensor.role in WEIGHTS)
        roles = {item.tensor.role for item in held}
        parts = [counted(count, "tensor"), *(words for role, words in BESIDE_WEIGHTS.items() if role in roles)]
        host = printable(files.ranks[rank].hostname)
        text.append(f" on {host}" if host else "")
        text.append(f"\n{bytes_text(sum(item.on(rank) for item in held))}: {', '.join(parts)}")
    elif document.is_partial:
        text.append("\n… not read yet", "dim")
    else:
        text.append("\n? the dump has no readable file for this rank", verdict_style("warning"))
    if rank in mesh:
        width = max(map(len, mesh.axes))
        for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True):
            group = ranks_in_words(mesh.group_of(rank, axis))
            text.append(f"\n{axis:<{width}} ", "dim").append(f"{position} among {group}")
    return text


class MeshView(View["Document"]):
    """Every rank in a grid of axes; the groups of the chosen one and its part of the chosen tensor."""

    NAME = "mesh"
    TITLE = "Mesh"
    TOOLTIP = "All ranks by their coordinates"
    FOCUS = "#mesh-grid"

    BINDINGS = keys(
        "mesh",
        [
            ("a", "next_axis", "Next group", "Underline the group along the next axis"),
            ("b", "next_heat", "Next heat", "Color ranks by bytes, by findings, by bytes received, or by their place"),
            ("enter", "app.show_view('rank')", "Open rank", "Show everything that this rank holds"),
        ],
    )

    _axis = ""
    _heat = 0

    def compose(self) -> ComposeResult:
        """Put the grid on the left, the rank's card over its map on the right."""
        with Box(id="mesh-box"):
            yield MeshGrid(id="mesh-grid")
            yield Static(LEGEND, classes="legend", markup=False)
        with Vertical(id="mesh-side"):
            with ScrollBox(classes="boxed short", can_focus=False):
                yield Static(id="rank-card", classes="rank-card")
            with Box(id="mesh-map-box"):
                yield TensorMap(id="mesh-map")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen rank, and the ranks that hold the element under the map's cursor."""
        mesh, rank = document.mesh, rank_of(document, selection)
        axis = self._axis if self._axis in mesh.axes else ""
        heat = document.heats[self._heat - 1] if 0 < self._heat <= len(document.heats) else None
        lights, coloring = lights_of(document, selection, rank, axis), document.coloring_of(selection.entry)
        self.query_one(MeshGrid).show(mesh, rank, lights, coloring, heat)
        below = f"underlined: the group along {axis}" if axis else ""
        self.query_one("#mesh-box", Box).set_titles(f"mesh {mesh}", str(heat) if heat else below)
        self.query_one(".rank-card", Static).update(rank_text(document, rank))
        if document.entries:
            self._show_map(document, selection, rank)

    def _show_map(self, document: Document, selection: Selection, rank: int) -> None:
        side: Side = "held" if selection.side == "difference" else selection.side
        sides = document.drawn(selection.entry, selection.name)
        shown_side = drawn_side(sides, side) if sides is not None else side
        self.query_one(TensorMap).show(sides, shown_side, selection.plane, lit=rank)
        name = document.entries[selection.entry].title_of(selection.name)
        self.query_one("#mesh-map-box", Box).set_titles(f"rank {rank}'s part of {fitted(name)}")

    def action_next_axis(self) -> None:
        """Underline the group along the next axis, or none."""
        if self.state.document is not None:
            self._axis = after(["", *self.state.document.mesh.axes], self._axis)
            self.show_again()

    def action_next_heat(self) -> None:
        """Color ranks by the next number, or by their place again."""
        if self.state.document is not None:
            self._heat = (self._heat + 1) % (len(self.state.document.heats) + 1)
            self.show_again()


class RankTree(TensorTree):
    """The modules with the tensors that a rank holds, each with its bytes there and the rank's part of it."""

    HELP = """\
## One rank

Every tensor that the rank holds: its bytes, and the rank's part of it in global indices. Layers that are alike are one
line, `32 × 128 KiB`: the bytes and the part are those of one of them. `-` means that it takes no memory of its own: it
is a result of the step, or is counted with the tensor that it shares storage with.
"""

    BINDINGS = keys("held", [("o", "sort", "Sort", "Sort as in the model, largest first, or wrong first")])

    _document: Document | None = None
    _rank = 0

    def show_rank(self, document: Document, rank: int) -> None:
        """Say whose tensors are listed."""
        if self._document is not document or self._rank != rank:
            self._document, self._rank = document, rank
            self._sizes = cache(self._sizes_in)

    def _sizes_in(self, node: Node) -> list[int]:
        """Return the bytes of each tensor in a module."""
        if node.entry is None or self._document is None:
            return [size for part in node.parts.values() for size in self._sizes(part)]
        return self._document.sizes_of(node.entry, self._rank, node.names)

    def about(self, row: TreeLine, column: int) -> Text:
        """Return the bytes of a line, and a tensor's part of the whole if there is room."""
        text = self._size_text(row)
        if row.entry is not None and self._document is not None:
            part = f"  {part_text(self._document.entries[row.entry].tensor.shards[self._rank])}"
            text += part * (column + len(text + part) <= self.text_width)
        return Text(text, "dim")

    def _size_text(self, row: TreeLine) -> str:
        return f"  {size_text([sum(sizes) for node in row.nodes if (sizes := self._sizes(node))])}"

    def room_for_name(self, row: TreeLine, column: int) -> int:
        """Return the columns that leave room for the bytes."""
        return max(self.text_width - column - len(self._size_text(row)), LEAST_NAME)

    def _largest_first(self, alike: Sequence[Node]) -> float:
        return -sum(sum(self._sizes(node)) for node in alike)

    def action_sort(self) -> None:
        """Sort in another way."""
        self.show_tree(self._root, after([None, self._largest_first, errors_first], self.order))


class RankView(View["Document"], Searching):
    """A rank's card, the tensors that it holds, and the numbers of one of them, or where its part is."""

    NAME = "rank"
    TITLE = "Rank"
    TOOLTIP = "Everything that one rank holds"
    FOCUS = "#held"

    BINDINGS = keys(
        "rank",
        [
            ("left_square_bracket,less_than_sign", "step(-1)", "Prev rank", "Go to the previous rank"),
            ("right_square_bracket", "step(1)", "Next rank", "Go to the next rank"),
            ("v", "toggle('values')", "Ids/values", "Show elements beside those claimed, or values beside a copy's"),
            *SEARCHING,
        ],
        hidden=[TO_TREE],
    )

    values = var(False, init=False)
    """Whether values are shown instead of elements."""
    watch_values = View.show_again

    def compose(self) -> ComposeResult:
        """Put the card over the tensors on the left, the numbers on the right."""
        with Vertical(id="rank-left"):
            with Box(classes="boxed short"):
                yield Static(id="rank-of", classes="rank-card")
            yield Listing(RankTree(id="held"), role="all", id="held-box")
        with Box(id="memory-box"):
            yield ValuesGrid(id="memory")
            yield TensorMap(id="rank-map")
            yield Static(id="memory-note", markup=False, classes="legend")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen rank and tensor."""
        rank = rank_of(document, selection)
        self.query_one(".rank-card", Static).update(rank_text(document, rank))
        self.query_one(RankTree).show_rank(document, rank)
        self.query_one(Listing).show(document.entries, selection.entry, name_of(document, selection), rank)
        self._show_memory(document, selection, rank)

    def _show_memory(self, document: Document, selection: Selection, rank: int) -> None:
        shown, why = _memory(document, selection, rank, values=self.values)
        grid, part = self.query_one(ValuesGrid), self.query_one(TensorMap)
        sides = document.drawn(selection.entry, selection.name) if shown is None else None
        grid.show(shown)
        grid.display, part.display = sides is None, sides is not None
        part.show(sides, "held" if sides is not None and sides.has_held else "claimed", selection.plane, lit=rank)
        box, note = self.query_one("#memory-box", Box), self.query_one("#memory-note", Static)
        if document.entries:
            name = printable(name_of(document, selection))
            box.set_titles(f"{fitted(name)} on rank {rank}")
        note.update(why or (f"local shape {list(shown.memory.shape)}" if shown else ""), layout=False)

    @on(TensorOpened)
    def _opened(self) -> None:
        self.state.action_show_view("explore")

    def action_step(self, step: int) -> None:
        """Go to another rank, in the mesh's order; after the last comes the first."""
        if (document := self.state.document) is not None:
            ranks, rank = document.mesh.ranks, rank_of(document, self.state.selection)
            at = ranks.index(rank) if rank in ranks else 0
            self.state.selection = replace(self.state.selection, rank=ranks[(at + step) % len(ranks)])


def _memory(document: Document, selection: Selection, rank: int, *, values: bool) -> tuple[Beside | None, str]:
    """Return the numbers, or why there are none."""
    if not document.entries or rank not in document.entries[selection.entry].tensor.shards:
        return None, f"rank {rank} holds no part of this tensor"
    tensor, name = document.entries[selection.entry].tensor, name_of(document, selection)
    place = selection.plane.at if selection.plane else ()
    try:
        numbers = values_beside(document.dump, tensor, rank, name)
        if values or tensor.moment != "stamped":
            is_plan = document.dump.files.planned is not None
            why = "a plan has no values" if is_plan else "the dump has no values for this tensor"
            return numbers, "" if numbers else why
        ids = ids_beside(document.dump, tensor, rank, name, place[len(place) - len(tensor.shape) :])
        return (ids if document.is_judged else replace(ids, due=None)), ""
    except ShardvizError as error:
        return None, printable(error.message)
