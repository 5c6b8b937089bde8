"""The first view: the tensors, the map of the chosen one, and its finding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on

from ..keys import keys
from ..model.filters import Filters, after, axes_of, roles_of
from ..model.messages import ElementAsked, TensorChosen, TensorOpened
from ..model.selection import of_entry
from ..widgets.box import Box, Row, ScrollBox
from ..widgets.finding_card import FindingCard, finding_head
from ..widgets.map.panel import MapPanel
from ..widgets.search import Search
from ..widgets.tensor_tree import TensorTree
from .goto import GotoScreen
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.widgets import Input

    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.state import State


class ExploreView(View):
    """A tree of tensors, the map of the chosen one, and its finding."""

    NAME = "explore"
    TITLE = "Tensors"
    TOOLTIP = "The tensors and their maps"
    FOCUS = "#tree"

    BINDINGS: ClassVar[list[BindingType]] = [
        *keys(
            "explore",
            [
                ("v", "next_side", "Claimed/held", "Show claimed, held, or their difference"),
                ("slash", "search", "Search", "Find tensors by name"),
                ("f", "only_findings", "Wrong only", "Show only tensors with findings, or all"),
            ],
            show=True,
        ),
        *keys(
            "explore",
            [
                ("r", "next_role", "Role", "Show all tensors, also the step's, or those of one role"),
                ("a", "next_axis", "Axis", "Show only tensors split over the next mesh axis"),
                ("escape", "to_tree", "To the tensors", "Go back to the tensors; there, clear the filters"),
            ],
        ),
    ]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._filters = Filters()
        self._listed: tuple[Document | None, Filters] | None = None

    def compose(self) -> ComposeResult:
        """Put the tree on the left, the map on the right, the finding below both."""
        with Row():
            with Box(id="tree-box"):
                yield Search(id="search")
                yield TensorTree(id="tree")
            yield MapPanel(id="map-panel")
        with ScrollBox(id="finding"):
            yield FindingCard(id="card")

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the chosen tensor and finding."""
        if document is not None and document.entries and not self._lists(document, selection):
            self._filters = replace(self._filters, role="all")
        self._list(document)
        self.query_one(FindingCard).show(document, selection.finding)
        box = self.query_one("#finding", ScrollBox)
        box.entitle(finding_head(document, selection.finding))
        box.set_class(document is not None and document.is_seen_in_its_card(selection.finding), "-seen")
        if document is not None and document.entries:
            self.query_one(TensorTree).choose(selection.entry)
            self.query_one(MapPanel).show(document, selection)

    def _lists(self, document: Document, selection: Selection) -> bool:
        """Whether the chosen tensor is listed, or left out by another filter than the role."""
        entry = document.entries[selection.entry]
        return self._filters.passes(entry) or not replace(self._filters, role="all").passes(entry)

    def _list(self, document: Document | None) -> None:
        """List the tensors that pass the filters."""
        if self._listed is not None and self._listed[0] is document and self._listed[1] == self._filters:
            return
        self._listed = (document, self._filters)
        entries = document.entries if document else ()
        shown = [index for index, entry in enumerate(entries) if self._filters.passes(entry)]
        if not shown and self._filters == Filters():
            shown = list(range(len(entries)))
        self.query_one(TensorTree).fill(entries, shown)
        hidden, is_asked_for = len(entries) - len(shown), self._filters != Filters()
        names = [len(entry.tensor.names) for entry in entries]  # the title counts each of identical layers, too
        some = f"{sum(names[index] for index in shown):,} of {sum(names):,}"
        title = f"Tensors: {some}" if hidden and is_asked_for else "Tensors"
        below = str(self._filters)
        if is_asked_for and not shown:
            below = f"esc: clear the filters ({below or 'by name'})"
        elif hidden and not is_asked_for:
            below = f"r: {hidden:,} more from the step"
        self.query_one("#tree-box", Box).entitle(title, below)
        if shown and self.state.selection.entry not in shown and document is not None:
            self.state.selection = of_entry(document, self.state.selection, shown[0])

    def _filter(self, filters: Filters) -> None:
        self._filters = filters
        self._list(self.state.document)
        self.query_one(TensorTree).choose(self.state.selection.entry)

    @on(TensorChosen)
    def _tensor_chosen(self, message: TensorChosen) -> None:
        document, selection = self.state.document, self.state.selection
        if document is not None and message.entry != selection.entry:
            self.state.selection = of_entry(document, selection, message.entry)

    @on(TensorOpened)
    def _tensor_opened(self) -> None:
        self.query_one(MapPanel).focus_map()

    @on(ElementAsked)
    def _element_asked(self, message: ElementAsked) -> None:
        self.app.push_screen(GotoScreen(message.shape), self.query_one(MapPanel).go)

    @on(Search.Changed)
    def _searched(self, message: Input.Changed) -> None:
        self._filter(replace(self._filters, text=message.value.strip()))

    @on(Search.Closed)
    def _search_closed(self) -> None:
        self.query_one(TensorTree).focus()

    def action_search(self) -> None:
        """Open the search line."""
        self.query_one(Search).open()

    def action_only_findings(self) -> None:
        """List only tensors with findings, or all again."""
        self._filter(replace(self._filters, findings=not self._filters.findings))

    def action_next_role(self) -> None:
        """List only tensors of the next role."""
        if self.state.document is not None:
            self._filter(replace(self._filters, role=after(roles_of(self.state.document), self._filters.role)))

    def action_next_axis(self) -> None:
        """List only tensors over the next axis."""
        if self.state.document is not None:
            self._filter(replace(self._filters, axis=after(axes_of(self.state.document), self._filters.axis)))

    def action_to_tree(self) -> None:
        """Go back to the tensors; if they have the focus, clear the filters."""
        tree = self.query_one(TensorTree)
        if tree.has_focus and self._filters != Filters():
            self.query_one(Search).action_clear_and_close()
            self._filter(Filters())
        tree.focus()
