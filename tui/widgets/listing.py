"""The tensors as a tree of modules in their box, with the search line above, as both viewers show them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import on
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.message import Message
from textual.widgets import Input

from shardviz.picture.text.terminal import UNICODE

from ..colors import verdict_style
from ..keys import keys
from ..model.filters import Filters
from ..model.messages import TensorChosen, TensorOpened
from ..model.names import shortened
from ..model.tree import errors_first, tree_of
from .box import Box
from .grid import Lines
from .module_tree import ModuleTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from ..keys import KeySpec
    from ..model.filters import Entry, Kept
    from ..model.tree import Node, TreeLine


LEAST_NAME = 8
"""Columns of a name in the narrowest tree."""

LEAST_LAYOUT = 0.6
"""The part of a layout that is shown where not all of it fits; with less of it the name stands alone."""


class TensorTree(ModuleTree):
    """Modules that open and close, with the tensors in them, each with its verdict."""

    HELP = """\
## The tensors

Every tensor of the model under its module, with the layout that its placements claim: `12/tp/fsdp` is a dim of 12,
split over the mesh axis tp and each part again over fsdp. Behind it are the shape and the bytes of one rank's part.
`plain` is a tensor without placements: nothing says which part of a whole a rank holds.

`✗` wrong numbers, `!` a warning, `?` not checked, `✓` in order; a module shows the worst in it.

Layers that are alike all through are one line, `layers.[0-31]`. A layer that differs in anything stands whole beside
them, and so does one that you search for or go to.
"""

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "tree", hidden=[("o", "errors_first", "Errors first", "Show what is wrong first, or the model's own order")]
    )

    entries: Sequence[Entry] = ()

    def sign(self, row: TreeLine) -> Text:
        """Return the verdict's glyph."""
        return Text.assemble((UNICODE.of(row.verdict), verdict_style(row.verdict)), " ")

    def about(self, row: TreeLine, column: int) -> Text:
        """Return a tensor's layout, and what one rank has of it where there is room."""
        if row.entry is None:
            return Text()
        entry = self.entries[row.entry]
        layout, facts = f"  {entry.short_layout}", f"  {entry.facts}"
        room = self.text_width - column
        if len(layout) > room:
            return Text(shortened(layout, room) if room > len(layout) * LEAST_LAYOUT else "", "dim")
        return Text(layout + facts * (len(layout) + len(facts) <= room), "dim")

    def room_for_name(self, column: int) -> int:
        """Return the columns to the edge: a layout comes behind a name that leaves room for it."""
        return max(self.text_width - column, LEAST_NAME)

    def opened(self, row: TreeLine) -> None:
        """Go to the map of a tensor."""
        self.post_message(TensorOpened(row.entry or 0))

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        message.stop()
        row = self._visible[message.index]
        if row.entry is not None:
            self.post_message(TensorChosen(row.entry, row.names[0]))

    def action_errors_first(self) -> None:
        """Put what is wrong first in every module, or go back to the model's own order."""
        self.show_tree(self._root, None if self.order else errors_first)


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

    filters = Filters()
    _entries: Sequence[Entry] = ()
    _listed: tuple[Sequence[Entry], Filters] | None = None
    _chosen = (0, "")

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._trees: dict[Filters, tuple[Kept, Node]] = {}
        """The trees of the entries that were listed, by their filters: clearing a filter shows one again."""

    def compose(self) -> ComposeResult:
        """Put the search line above the tree."""
        self.set_titles("Tensors")
        yield Search(id="search")
        yield TensorTree(id="tree")

    def show(self, entries: Sequence[Entry], entry: int, name: str = "") -> None:
        """List the entries that pass the filters, with the cursor on the chosen one."""
        self._entries, self._chosen = entries, (entry, name)
        every = replace(self.filters, role="all")
        if entries and every.passes(entries[entry]) and not self.filters.passes(entries[entry]):
            self.filters = every
        self.filter()

    def filter(self, **changes: Any) -> None:
        """List the tensors that pass other filters."""
        self.filters = replace(self.filters, **changes)
        if self._listed is None or self._listed[0] is not self._entries or self._listed[1] != self.filters:
            self._list()
        self.query_one(TensorTree).choose(*self._chosen)

    def _list(self) -> None:
        entries, filters = self._entries, self.filters
        if self._listed is None or self._listed[0] is not entries:
            self._trees.clear()
        self._listed = (entries, filters)
        if filters not in self._trees:
            kept = filters.kept(entries)
            self._trees[filters] = (kept, tree_of(entries, kept))
        (kept, root), tree = self._trees[filters], self.query_one(TensorTree)
        tree.entries = entries
        tree.show_tree(root, tree.order)
        self._entitle(sum(map(len, kept.values())), sum(len(entry.names) for entry in entries))
        chosen, name = self._chosen
        if kept and (chosen not in kept or (filters.text and name not in kept[chosen])):
            chosen = chosen if chosen in kept else next(iter(kept))
            self._chosen = (chosen, kept[chosen][0])
            self.post_message(TensorChosen(*self._chosen))  # the tree comes to it in this frame, all else in the next

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
        self.filter(text=message.value.strip())

    @on(Search.Closed)
    def _search_closed(self) -> None:
        """Go to the tensors; the layer that was searched for stays on its own when all are shown again."""
        tree = self.query_one(TensorTree)
        if self.filters.text and self._chosen[1]:
            tree.set_apart(self._chosen[1])
        tree.focus()

    def set_apart(self, name: str) -> None:
        """Let the layer that a name is in stand on its own, and show all tensors if it is not listed."""
        if not any(name in names for names in self.filters.kept(self._entries).values()):
            self.clear()
        self.query_one(TensorTree).set_apart(name)

    def clear(self) -> None:
        """Show all tensors again."""
        self.query_one(Search).action_clear_and_close()
        self.filters = Filters()
        self.filter()


class Searching(DOMNode):
    """The actions of what has a listing in it, so that its keys work beside it too."""

    def action_search(self) -> None:
        """Open the search line."""
        self.query_one(Listing).query_one(Search).open()

    def action_only_findings(self) -> None:
        """List only tensors with findings, or all again."""
        listing = self.query_one(Listing)
        listing.filter(findings=not listing.filters.findings)

    def action_to_tree(self) -> None:
        """Go back to the tensors; if they have the focus, clear the filters."""
        listing = self.query_one(Listing)
        tree = listing.query_one(TensorTree)
        if tree.has_focus and listing.filters != Filters():
            listing.clear()
        tree.focus()
