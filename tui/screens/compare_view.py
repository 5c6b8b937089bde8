"""Two dumps side by side: the same tensor of both, with one cursor, one side and one zoom."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.containers import Horizontal
from textual.widgets import Static

from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import GREY, VERMILLION
from shardviz.picture.text.tables.table import padded
from shardviz.text import counted, printable

from ..colors import ink
from ..keys import keys
from ..model.messages import Zoomed
from ..model.names import shortened
from ..model.pairs import SIGNS, Pair, pairs
from ..model.selection import of_entry
from ..widgets.box import Box
from ..widgets.grid import Lines
from ..widgets.tensor_map import TensorMap
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.check.diff import Difference
    from shardviz.picture.model.holders import Holders, Plane

    from ..model.document import Document
    from ..model.selection import Selection
    from .view import State


LEGEND = "Tensors: ≠ different  < first only  > second only  = the same  ? not compared"


class PairsView(View):
    """Tensors of two sides in a list, and below it two maps of the chosen one that share a cursor and a zoom."""

    LINES: ClassVar[type[Lines]]

    def compose(self) -> ComposeResult:
        """Put the pairs above, and below them a map for each side, under a line for its layout."""
        with Box(id="pairs-box") as box:
            box.set_titles("comparing …")
            yield self.LINES(id="pairs")
        with Horizontal(id="both"):
            for name in ("here", "there"):
                with Box(id=f"{name}-box"):
                    yield Static("", id=f"{name}-layout", classes="legend", markup=False)
                    yield TensorMap(id=name)

    @on(Zoomed)
    def _zoomed(self, message: Zoomed) -> None:
        for tensor_map in self.query(TensorMap):
            tensor_map.zoom_to(message.level)


def pair_text(sign: str, name: str, what: str) -> Text:
    """Write a line of the list: how a pair compares as a sign, its name, and what differs."""
    style = ink(GREY if sign in "=?" else VERMILLION, bold=True)
    return Text.assemble((f" {sign} ", style), padded(shortened(name), 32) + "  ", (what, "dim"), no_wrap=True)


def is_inside(plane: Plane, holders: Holders) -> bool:
    """Whether the place of a plane's cursor is an element of a tensor too."""
    shape = holders.shape
    return len(shape) == len(plane.at) and all(at < size for at, size in zip(plane.at, shape, strict=True))


class PairLines(Lines):
    """The list of the tensors of both dumps."""

    HELP = """\
## Two dumps side by side

The tensors of both dumps, different ones first. The maps below share one cursor, one side and one zoom: to move on one
is to move on the other.
"""


class CompareView(PairsView):
    """The pairs of tensors in two dumps, and the maps of the chosen pair side by side."""

    NAME = "compare"
    TITLE = "Compare"
    TOOLTIP = "Both dumps side by side"
    FOCUS = "#pairs"
    LINES = PairLines

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "compare", [("v", "next_side", "Claimed/held", "Show claimed, held, or their difference")], show=True
    )

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._pairs: list[Pair] = []
        self._of: Difference | None = None

    def on_mount(self) -> None:
        """Follow the comparison too."""
        super().on_mount()
        self.watch(self.app, "difference", self.show_again, init=False)

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the pair of the chosen tensor."""
        other, difference = self.state.other_document, self.state.difference
        if document is None or other is None or difference is None:
            return
        if self._of is not difference:
            self._of, self._pairs = difference, pairs(document, other, difference)
            self.query_one("#pairs-box", Box).set_titles(LEGEND, _findings_text(difference))
            if self.display and self._leads_to_first(document, selection):
                return
        cursor = self._cursor(selection)
        self.query_one(Lines).show(len(self._pairs), self._line, cursor)
        if self._pairs:
            pair = self._pairs[cursor]
            self._show_map("here", document, pair.here, selection)
            self._show_map("there", other, pair.there, selection)

    def _leads_to_first(self, document: Document, selection: Selection) -> bool:
        """Go to the first tensor that differs; return whether it was not the chosen one yet."""
        first = self._pairs[0] if self._pairs else None
        if first is None or first.here in (None, selection.entry) or first.relation != "different":
            return False
        self.state.selection = of_entry(document, selection, first.here)
        return True

    def _cursor(self, selection: Selection) -> int:
        """Return the line of the chosen tensor; on a tensor that only the second dump has, the cursor stays."""
        at = self.query_one(Lines).cursor
        if at < len(self._pairs) and self._pairs[at].here in (None, selection.entry):
            return at
        return next((index for index, pair in enumerate(self._pairs) if pair.here == selection.entry), 0)

    def _show_map(self, name: str, document: Document, entry: int | None, selection: Selection) -> None:
        box, layout = self.query_one(f"#{name}-box", Box), self.query_one(f"#{name}-layout", Static)
        box.set_titles(printable(document.path.name), selection.side)
        sides, text = None, "not in this dump"
        if entry is not None:
            try:
                sides, text = document.sides(entry), document.entries[entry].layout
            except ShardvizError as error:
                text = f"? not drawn: {printable(error.message)}"
        layout.update(text, layout=False)
        plane = selection.plane
        if sides is None or plane is None or not is_inside(plane, sides.holders):
            sides = None
        self.query_one(f"#{name}", TensorMap).show(sides, selection.side, plane)

    def _line(self, index: int) -> Text:
        pair = self._pairs[index]
        return pair_text(SIGNS[pair.relation], pair.title, pair.what or pair.relation)

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        pair, document = self._pairs[message.index], self.state.document
        if document is not None and pair.here is not None:
            self.state.selection = of_entry(document, self.state.selection, pair.here)
        else:
            self.show(document, self.state.selection)


def _findings_text(difference: Difference) -> str:
    """Write how the findings differ."""
    counts = [(len(difference.lost), "only in the first"), (len(difference.gained), "only in the second")]
    return (
        " · ".join(f"{counted(count, 'finding')} {where}" for count, where in counts if count)
        or "the findings are the same"
    )
