"""The first view: the tensors, the map of the chosen one, and what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll

from shardviz.errors import ShardvizError

from ..messages import PlaceChosen, SideChosen, TensorChosen
from ..selection import of_entry
from ..widgets.finding_card import FindingCard
from ..widgets.inspector import Inspector
from ..widgets.side_bar import SIDES, SideBar
from ..widgets.tensor_map import TensorMap
from ..widgets.tensor_tree import TensorTree
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from shardviz.picture.paint import Side
    from shardviz.picture.sides import Sides

    from ..document import Document, Entry
    from ..selection import Selection


class ExploreView(View):
    """The view."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "next_side", "Claimed/held", id="explore.side", tooltip="Claimed, held, or where they differ"),
    ]

    def compose_view(self) -> ComposeResult:
        """Make the view."""
        with Horizontal():
            yield TensorTree(id="tree")
            with Vertical(id="right"):
                yield SideBar(id="sides")
                yield TensorMap(id="map")
                yield Inspector(id="inspector")
        with VerticalScroll(id="finding", can_focus=True):
            yield FindingCard(id="card")

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the chosen tensor and finding."""
        tree = self.query_one(TensorTree)
        if document is not self._document_in_tree:
            self._document_in_tree = document
            tree.show(document.entries if document else (), range(len(document.entries)) if document else ())
        self.query_one(FindingCard).show(document, selection.finding)
        if document is None or not document.entries:
            return
        tree.choose(selection.entry)
        self._show_map(document, selection)

    _document_in_tree: Document | None = None

    def _show_map(self, document: Document, selection: Selection) -> None:
        entry = document.entries[selection.entry]
        sides, why = _sides(document, selection.entry)
        self.query_one(SideBar).show(selection.side)
        self.query_one(TensorMap).show(sides, selection.side, selection.plane, _suffix(entry))
        self.query_one(Inspector).show(document, selection, sides, why)

    @on(TensorChosen)
    def _tensor_chosen(self, message: TensorChosen) -> None:
        document, selection = self.app.document, self.app.selection
        if document is not None and message.entry != selection.entry:
            self.app.selection = of_entry(document, selection, message.entry)

    @on(SideChosen)
    def _side_chosen(self, message: SideChosen) -> None:
        self.app.selection = replace(self.app.selection, side=message.side)

    @on(PlaceChosen)
    def _place_chosen(self, message: PlaceChosen) -> None:
        selection = self.app.selection
        if selection.plane is not None:
            self.app.selection = replace(selection, plane=replace(selection.plane, at=message.place))

    def action_next_side(self) -> None:
        """Go from claimed to held to difference."""
        side: Side = SIDES[(SIDES.index(self.app.selection.side) + 1) % len(SIDES)]
        self.app.selection = replace(self.app.selection, side=side)


def _sides(document: Document, entry: int) -> tuple[Sides | None, str]:
    """Return what can be drawn of an entry, or why nothing can."""
    try:
        return document.sides(entry), ""
    except ShardvizError as error:
        return None, error.message


def _suffix(entry: Entry) -> str:
    """Return what a label says of pending sums."""
    claimed = entry.tensor.claimed
    return " ".join(f"+{axis}" for axis, _ in claimed.partial) if claimed else ""
