"""The tensors in their box with the search line above, as both viewers show them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.message import Message
from textual.widgets import Input

from ..model.filters import Filters
from ..model.messages import TensorChosen
from ..model.tree import tree_of
from .box import Box
from .tensor_tree import TensorTree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from textual.app import ComposeResult

    from ..keys import KeySpec
    from ..model.filters import Filtered
    from ..model.tree import Listed

    class Entry(Filtered, Listed, Protocol):
        """A tensor of a dump or of a checkpoint."""


class Search(Input):
    """An input for part of a name; enter keeps the tensors found, escape shows all again."""

    class Closed(Message):
        """The search is over."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear_and_close", "All tensors", id="search.close", tooltip="Show all tensors again"),
        Binding("enter,down", "close", "To the tensors", id="search.done", tooltip="Keep the tensors found"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(placeholder="part of a name", compact=True, id=id, select_on_focus=False)
        self.display = False

    def open(self) -> None:
        """Show the line and type into it."""
        self.display = True
        self.focus()

    def action_close(self) -> None:
        """Keep the tensors found; without a text, hide the line."""
        self.display = bool(self.value)
        self.post_message(self.Closed())

    def action_clear_and_close(self) -> None:
        """Show all tensors again."""
        self.value = ""
        self.action_close()


SEARCHING: tuple[KeySpec, ...] = (
    ("slash", "search", "Search", "Find tensors by name"),
    ("f", "only_findings", "Wrong", "Show only tensors with findings, or all"),
)
TO_TREE: KeySpec = ("escape", "to_tree", "To the tensors", "Go back to the tensors; there, clear the filters")
"""Keys that a viewer binds around the listing, so that they work beside it too."""


class Listing(Box):
    """A search line above the tree of the tensors that pass the filters."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.filters = Filters()
        self._entries: Sequence[Entry] = ()
        self._listed: tuple[Sequence[Entry], Filters] | None = None
        self._chosen = (0, "")

    def compose(self) -> ComposeResult:
        """Put the search line above the tree."""
        yield Search(id="search")
        yield TensorTree(id="tree")

    def show(self, entries: Sequence[Entry], entry: int, name: str = "") -> None:
        """List the entries that pass the filters, with the cursor on the chosen one."""
        self._entries, self._chosen = entries, (entry, name)
        if entries and not self._lists(entries[entry]):
            self.filters = replace(self.filters, role="all")
        self._list()
        self.query_one(TensorTree).choose(entry, name)

    def _lists(self, chosen: Filtered) -> bool:
        """Whether the chosen tensor is listed, or left out by another filter than the role."""
        return self.filters.passes(chosen) or not replace(self.filters, role="all").passes(chosen)

    def filter(self, filters: Filters) -> None:
        """List the tensors that pass other filters."""
        self.filters = filters
        self._list()
        self.query_one(TensorTree).choose(*self._chosen)

    def _list(self) -> None:
        if self._listed is not None and self._listed[0] is self._entries and self._listed[1] == self.filters:
            return
        entries, filters = self._entries, self.filters
        self._listed = (entries, filters)
        kept = filters.kept(entries)
        self.query_one(TensorTree).fill(entries, tree_of(entries, kept))
        self._entitle(sum(map(len, kept.values())), sum(len(entry.names) for entry in entries))
        chosen, name = self._chosen
        if kept and chosen not in kept:
            first = next(iter(kept))
            self._choose(first, kept[first][0])
        elif kept and filters.text and name not in kept[chosen]:
            self._choose(chosen, kept[chosen][0])

    def _choose(self, entry: int, name: str) -> None:
        """Choose a tensor that is listed: the tree comes to it in this frame, what else shows it in the next."""
        self._chosen = (entry, name)
        self.post_message(TensorChosen(entry, name))

    def _entitle(self, shown: int, of: int) -> None:
        """Write how many tensors are listed, and what leaves out the others."""
        hidden, is_asked_for = of - shown, self.filters != Filters()
        title = f"Tensors: {shown:,} of {of:,}" if hidden and is_asked_for else "Tensors"
        below = str(self.filters)
        if is_asked_for and not shown:
            below = f"esc: clear the filters ({below or 'by name'})"
        elif hidden and not is_asked_for:
            below = f"r: show {hidden:,} of the step"
        self.set_titles(title, below)

    @on(Search.Changed)
    def _searched(self, message: Input.Changed) -> None:
        self.filter(replace(self.filters, text=message.value.strip()))

    @on(Search.Closed)
    def _search_closed(self) -> None:
        """Go to the tensors; the layer that was searched for stays on its own when all are shown again."""
        tree = self.query_one(TensorTree)
        if self.filters.text and self._chosen[1]:
            tree.set_apart(self._chosen[1])
        tree.focus()

    def set_apart(self, name: str) -> None:
        """Let the layer that a name is in stand on its own, and show all tensors if it is not listed."""
        if not any(self.filters.keeps(entry, name) and self.filters.passes(entry) for entry in self._named(name)):
            self.clear()
        self.query_one(TensorTree).set_apart(name)

    def clear(self) -> None:
        """List all tensors again."""
        self.query_one(Search).action_clear_and_close()
        self.filter(Filters())

    def _named(self, name: str) -> list[Entry]:
        return [entry for entry in self._entries if name in entry.names]


class Searching(DOMNode):
    """The actions of what has a listing in it, so that its keys work beside it too."""

    def action_search(self) -> None:
        """Open the search line."""
        self.query_one(Listing).query_one(Search).open()

    def action_only_findings(self) -> None:
        """List only tensors with findings, or all again."""
        listing = self.query_one(Listing)
        listing.filter(replace(listing.filters, findings=not listing.filters.findings))

    def action_to_tree(self) -> None:
        """Go back to the tensors; if they have the focus, clear the filters."""
        listing = self.query_one(Listing)
        tree = listing.query_one(TensorTree)
        if tree.has_focus and listing.filters != Filters():
            listing.clear()
        tree.focus()
