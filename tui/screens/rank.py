"""One rank: everything that it holds, in bytes, and the numbers of the chosen tensor as they lie in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.widgets import Static

from shardviz.errors import ShardvizError
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import bytes_text, printable

from ..colours import verdict_style
from ..keys import keys
from ..model.memory import entries_of_rank, ids_in_memory, parts_text, values_in_memory
from ..model.names import shortened
from ..model.selection import of_entry, rank_of
from ..widgets.box import Box, Column, Row
from ..widgets.lines import Lines
from ..widgets.rank_card import RankCard
from ..widgets.values_grid import ValuesGrid
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ..model.document import Document
    from ..model.memory import Memory
    from ..model.selection import Selection
    from ..model.state import State


class RankView(View):
    """A rank's card, a line for every tensor that it holds, and the numbers of one of them."""

    NAME = "rank"
    TITLE = "Rank"
    TOOLTIP = "Everything that one rank holds"
    FOCUS = "#held"

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "rank",
        [
            ("left_square_bracket,less_than_sign", "step(-1)", "Prev rank", "Go to the previous rank"),
            ("right_square_bracket", "step(1)", "Next rank", "Go to the next rank"),
            ("v", "values", "Ids/values", "Show the ids, or the model's own values"),
        ],
        show=True,
    )

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._values = False

    def compose(self) -> ComposeResult:
        """Put the card over the lines on the left, the numbers on the right."""
        with Row():
            with Column(id="rank-left"):
                with Box(classes="boxed short"):
                    yield RankCard(id="rank-of")
                with Box(id="held-box") as box:
                    box.entitle("Tensors on this rank")
                    yield HeldLines(id="held")
            with Box(id="memory-box"):
                yield ValuesGrid(id="memory")
                yield Static("", id="memory-note", classes="legend", markup=False)

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the chosen rank and tensor."""
        if document is None:
            return
        rank = rank_of(document, selection)
        self.query_one(RankCard).show(document, rank)
        held = entries_of_rank(document, rank)
        cursor = held.index(selection.entry) if selection.entry in held else 0
        self.query_one(Lines).show(len(held), lambda line: _line(document, held[line], rank), cursor)
        self._show_memory(document, selection, rank)

    def _show_memory(self, document: Document, selection: Selection, rank: int) -> None:
        memory, why = _memory(document, selection.entry, rank, values=self._values)
        self.query_one(ValuesGrid).show(memory)
        box, note = self.query_one("#memory-box", Box), self.query_one("#memory-note", Static)
        if document.entries:
            name = printable(document.entries[selection.entry].tensor.names[0])
            box.entitle(f"{shortened(name)} on rank {rank}")
        note.update(why or (f"{memory.what}; local shape {list(memory.shape)}" if memory else ""))

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        document, selection = self.state.document, self.state.selection
        if document is not None:
            held = entries_of_rank(document, rank_of(document, selection))
            if message.index < len(held):
                self.state.selection = of_entry(document, selection, held[message.index])

    @on(Lines.Chosen)
    async def _chosen(self) -> None:
        await self.state.action_show_view("explore")

    def action_step(self, step: int) -> None:
        """Go to another rank, in the mesh's order; after the last comes the first."""
        if self.state.document is not None:
            ranks, rank = self.state.document.dump.files.mesh.ranks, rank_of(self.state.document, self.state.selection)
            at = ranks.index(rank) if rank in ranks else 0
            self.state.selection = replace(self.state.selection, rank=ranks[(at + step) % len(ranks)])

    def action_values(self) -> None:
        """Switch between ids and values."""
        self._values = not self._values
        self.show(self.state.document, self.state.selection)


class HeldLines(Lines):
    """The list of the tensors on a rank."""

    HELP = """\
## One rank

Every tensor that the rank holds: its bytes, its name, and the rank's part of it in global indices. Of identical layers
the bytes are those of all together, and the part is that of each: `80x [0:8, 0:8192]`. `-` means that it
takes no memory of its own: it is a result of the step, or is counted with the tensor that it shares storage with.
**[** and **]** go to the previous and the next rank, **enter** goes to the tensor's map.
"""


def _line(document: Document, entry: int, rank: int) -> Text:
    found = document.entries[entry]
    shard = found.tensor.shards[rank]
    taken = document.bytes_of(entry, rank)
    size = "-" if taken is None else bytes_text(taken)
    return Text.assemble(
        (UNICODE.of(found.verdict), verdict_style(found.verdict)),
        f" {size:>8}  ",
        (shortened(found.title), "bold"),
        (f"  {parts_text(found.tensor, shard)}", "dim"),
        no_wrap=True,
    )


def _memory(document: Document, entry: int, rank: int, *, values: bool) -> tuple[Memory | None, str]:
    """Return the numbers, or why there are none."""
    if not document.entries or rank not in document.entries[entry].tensor.shards:
        return None, f"rank {rank} holds no part of this tensor"
    tensor = document.entries[entry].tensor
    try:
        own = values_in_memory(document.dump, tensor, rank)
        if values or tensor.moment != "stamped":
            return own, "" if own else "the dump has no values for this tensor"
        return ids_in_memory(document.dump, tensor, rank), ""
    except ShardvizError as error:
        return None, printable(error.message)
