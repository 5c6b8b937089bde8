"""The tensors as a tree of modules in their box, with the search line above, as both viewers show them."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.text import Text
from textual import on
from textual.dom import DOMNode
from textual.widgets import Input

from shardviz.picture.text.terminal import UNICODE

from ..colors import verdict_style
from ..keys import keys
from ..model.names import LEAST_NAME, fitted
from ..model.selection import TensorChosen, TensorOpened
from ..model.tree import Filters, Node, errors_first, layer_of, lines_of, tree_of, visible
from .frame import Box
from .grid import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual import events
    from textual.app import ComposeResult

    from ..keys import KeySpec
    from ..model.tree import Apart, Entry, Kept, ModulePath, TreeLine


MOST_NAME = 60
MOST_OPEN = 64
"""With more lines than this, only modules with errors are open at first."""


class ModuleTree(Lines):
    """Modules with what is in them; the tree remembers which are open. Subclasses say what a line is about."""

    BINDINGS = keys(
        "tree",
        hidden=[
            ("right,l", "open(True)", "Open module", "Open this module"),
            ("left,h", "open(False)", "Close module", "Close this module, or go to the one around it"),
            ("u", "each_layer", "Each layer", "Show each of these layers on its own, or alike ones as one"),
        ],
    )

    order: Callable[[Sequence[Node]], float] | None = None
    _root: Node
    _every: Sequence[TreeLine] = ()
    _visible: Sequence[TreeLine] = ()
    _opened: Mapping[ModulePath, bool] = MappingProxyType({})
    _apart: Apart = frozenset()

    def sign(self, row: TreeLine) -> Text:
        """Return what stands before a line's name."""
        raise NotImplementedError

    def about(self, row: TreeLine, column: int) -> Text:
        """Return what stands behind a line's name, which ends at a column."""
        raise NotImplementedError

    def show_tree(self, root: Node, order: Callable[[Sequence[Node]], float] | None = None) -> None:
        """Show a tree, with the cursor on the same line as before, or on another of the same tensors or layers."""
        self._root, self.order = root, order
        self._arrange()

    def _arrange(self) -> None:
        before = self.at_cursor
        self._every = lines_of(self._root, self._apart, self.order)
        self._list(before)

    @property
    def at_cursor(self) -> TreeLine | None:
        """The line under the cursor; None if there is none."""
        return self._visible[self.cursor] if self.cursor < len(self._visible) else None

    def choose(self, entry: int, name: str = "") -> None:
        """Put the cursor on an entry, if it is listed, and open the modules around it."""
        current = self.at_cursor
        if current is not None and current.entry == entry and (not name or name in current.names):
            return
        rows = [row for row in self._every if row.entry == entry]
        row = next((row for row in rows if name in row.names), rows[0] if rows else None)
        if row is not None:
            self._opened = {**self._opened, **{row.path[:depth]: True for depth in range(1, len(row.path))}}
            self._list(row)

    def set_apart(self, name: str) -> None:
        """Let the layer that a name is in stand on its own."""
        layer = layer_of(name)
        if layer is not None and layer not in self._apart:
            self._apart |= {layer}
            self._arrange()

    def _is_open(self, row: TreeLine) -> bool:
        return self._opened.get(row.path, len(self._every) <= MOST_OPEN or row.verdict == "error")

    def _list(self, current: TreeLine | None) -> None:
        """List the lines in open modules, with the cursor on one of them, or on the closed module around it."""
        self._visible = visible(self._every, self._is_open)
        places = {row.path: at for at, row in reversed([*enumerate(self._visible)])}
        row = self._same(current) if current is not None and current.path not in places else current
        around = (row.path[:depth] for depth in range(len(row.path), 0, -1)) if row else ()
        cursor = next((places[path] for path in around if path in places), 0)
        self.show(len(self._visible), self._text, cursor)

    def _same(self, line: TreeLine) -> TreeLine | None:
        """Return the line that is now of the same module or tensor, or of the same layers: they may stand apart now."""
        for row in self._every:
            if (row.path, row.entry) == (line.path, line.entry):
                return row
        name = line.names[0] if line.names else ""
        return next((row for row in self._every if (name in row.names if name else row.key == line.key)), None)

    def _text(self, index: int) -> Text:
        row = self._visible[index]
        depth = len(row.path) - 1
        is_nested = any(line.entry is None for line in self._every)
        mark = "  " * (is_nested and not depth) if row.entry is not None else "▾ " if self._is_open(row) else "▸ "
        line = Text.assemble(("│ " * depth, "dim"), mark, self.sign(row), no_wrap=True)
        line.append(fitted(row.path[-1].rstrip(), self.room_for_name(row, line.cell_len)))
        return line.append_text(self.about(row, line.cell_len))

    def room_for_name(self, row: TreeLine, column: int) -> int:
        """Return the columns that a name from a column on may take."""
        return MOST_NAME

    def action_open(self, on: bool) -> None:
        """Open or close the module under the cursor; on a tensor, go to its module."""
        row = self.at_cursor
        if row is None:
            return
        if row.entry is None and on != self._is_open(row):
            self._toggle(row)
        elif not on:
            around = [index for index, other in enumerate(self._visible) if other.path == row.path[:-1]]
            self.action_move((around or [self.cursor])[0] - self.cursor)

    def action_each_layer(self) -> None:
        """Let each of the layers under the cursor stand on its own; if they do, fold alike ones again."""
        row = self.at_cursor
        while row is not None and row.number is None:  # the nearest module around that is one of several, or several
            path = row.path[:-1]
            row = next((other for other in self._visible if other.path == path), None)
        if row is not None:
            apart = frozenset(layer for layer in self._apart if layer[0] != row.key)
            is_apart = len(apart) < len(self._apart) and row.count == 1
            self._apart = apart if is_apart else apart | {(row.key, None)}
            self._arrange()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse; open or close a module; a second click goes to a tensor's map."""
        super().on_click(event)
        row = self.at_cursor
        if event.chain == 1 and event.y + self.scroll_offset.y < self.count and row and row.entry is None:
            self._toggle(row)

    @on(Lines.Chosen)
    def _chosen(self, message: Lines.Chosen) -> None:
        message.stop()
        row = self._visible[message.index]
        if row.entry is None:
            self._toggle(row)
        else:
            self.post_message(TensorOpened())

    def _toggle(self, row: TreeLine) -> None:
        self._opened = {**self._opened, row.path: not self._is_open(row)}
        self._list(row)


LEAST_LAYOUT = 0.6
"""The part of a layout that is shown if not all of it fits; with less of it the name stands alone."""


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

    BINDINGS = keys(
        "tree", hidden=[("o", "errors_first", "Errors first", "Show what is wrong first, or the model's own order")]
    )

    entries: Sequence[Entry] = ()

    def sign(self, row: TreeLine) -> Text:
        """Return the verdict's glyph."""
        return Text.assemble((UNICODE.of(row.verdict), verdict_style(row.verdict)), " ")

    def about(self, row: TreeLine, column: int) -> Text:
        """Return what is wrong if it is not the tensor itself, its layout, and what a rank has of it if that fits."""
        if row.entry is None:
            return Text()
        entry = self.entries[row.entry]
        wrong = f"  {entry.wrong}" if entry.wrong and row.verdict != "good" else ""
        room = self.text_width - column - len(wrong)
        layout, facts = f"  {entry.short_layout}", f"  {entry.facts}"
        shown = layout + facts * (len(layout) + len(facts) <= room)
        shown = shown * (room > len(layout) * LEAST_LAYOUT)
        return Text.assemble((wrong, verdict_style(row.verdict)), (shown, "dim"))

    def room_for_name(self, row: TreeLine, column: int) -> int:
        """Return the columns to the edge: a layout comes behind a name that leaves room for it."""
        return max(self.text_width - column, LEAST_NAME)

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
    """An input for part of a name; down leads to the tensors found, as enter does."""

    BINDINGS = keys("search", [("enter,down", "submit", "To the tensors", "Keep the tensors found")])


SEARCHING: tuple[KeySpec, ...] = (
    ("slash", "search", "Search", "Find tensors by name"),
    ("f", "only_findings", "Wrong", "Show only tensors with findings, or all"),
)
TO_TREE: KeySpec = ("escape", "to_tree", "To the tensors", "Go back to the tensors")
"""Keys that a viewer binds around the listing, so that they work beside it too."""


class Listing(Box):
    """A search line above the tree of the tensors that pass the filters."""

    BINDINGS = keys("listing", [("escape", "clear", "All tensors", "Show all tensors again")])

    _entries: Sequence[Entry] = ()
    _listed: tuple[Sequence[Entry], Filters] | None = None
    _chosen = (0, "")

    def __init__(self, tree: TensorTree, *, role: str = "", id: str | None = None) -> None:
        super().__init__(id=id)
        self._tree = tree
        self._search = Search(placeholder="part of a name", compact=True, select_on_focus=False)
        self._search.display = False
        self.base = self.filters = Filters(role=role)
        self._trees: dict[Filters, tuple[Kept, Node]] = {}
        """The trees that were listed, by their filters: clearing a filter shows one again."""

    def compose(self) -> ComposeResult:
        """Put the search line above the tree."""
        self.set_titles("Tensors")
        yield self._search
        yield self._tree

    def show(self, entries: Sequence[Entry], entry: int, name: str = "", rank: int | None = None) -> None:
        """List the entries that pass the filters, of a rank if given, with the cursor on the chosen one."""
        self._entries, self._chosen = entries, (entry, name)
        self.base, self.filters = replace(self.base, rank=rank), replace(self.filters, rank=rank)
        every = replace(self.filters, role="all")
        if entries and every.passes(entries[entry]) and not self.filters.passes(entries[entry]):
            self.filters = every
        self.filter()

    def filter(self, **changes: Any) -> None:
        """List the tensors that pass other filters."""
        self.filters = replace(self.filters, **changes)
        if self._listed is None or self._listed[0] is not self._entries or self._listed[1] != self.filters:
            self._list()
        self._tree.choose(*self._chosen)

    def _list(self) -> None:
        entries, filters, rank = self._entries, self.filters, self.filters.rank
        if self._listed is None or self._listed[0] is not entries or self._listed[1].rank != rank:
            self._trees.clear()
        self._listed = (entries, filters)
        if filters not in self._trees:
            kept = filters.kept(entries)
            self._trees[filters] = (kept, tree_of(entries, kept))
        kept, root = self._trees[filters]
        self._tree.entries = entries
        self._tree.show_tree(root, self._tree.order)
        every = sum(len(entry.names) for entry in entries if rank is None or entry.is_on(rank))
        self._entitle(sum(map(len, kept.values())), every)
        chosen, name = self._chosen
        if kept and filters != self.base and (chosen not in kept or (filters.text and name not in kept[chosen])):
            chosen = chosen if chosen in kept else next(iter(kept))
            self._chosen = (chosen, kept[chosen][0])
            self.post_message(TensorChosen(*self._chosen))  # the tree comes to it in this frame, all else in the next

    def _entitle(self, shown: int, of: int) -> None:
        """Write how many tensors are listed, and what leaves out the others."""
        hidden, is_asked_for = of - shown, self.filters != self.base
        title = f"Tensors: {shown:,} of {of:,}" if hidden and is_asked_for else "Tensors"
        below = str(self.filters) if is_asked_for else ""
        if is_asked_for and not shown:
            below = f"esc: clear the filters ({below or 'by name'})"
        elif hidden and not is_asked_for:
            below = f"r: show {hidden:,} of the step"
        self.set_titles(title, below)

    @on(Input.Changed)
    def _searched(self, message: Input.Changed) -> None:
        self.filter(text=message.value.strip())

    @on(Input.Submitted)
    def _close(self) -> None:
        """Go to the tensors; the layer that was searched for stays on its own when all are shown again."""
        if self.filters.text and self._chosen[1]:
            self._tree.set_apart(self._chosen[1])
        self._search.display = bool(self._search.value)
        self._tree.focus()

    def set_apart(self, name: str) -> None:
        """Let the layer that a name is in stand on its own, and show all tensors if it is not listed."""
        if not any(name in names for names in self.filters.kept(self._entries).values()):
            self.action_clear()
        self._tree.set_apart(name)

    def search(self) -> None:
        """Show the search line and type into it."""
        self._search.display = True
        self._search.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to go back to all tensors if that changes anything."""
        return action != "clear" or self.filters != self.base or self.screen.focused is self._search

    def action_clear(self) -> None:
        """Show all tensors again."""
        self._search.value = ""
        self._close()
        self.filters = self.base
        self.filter()


class Searching(DOMNode):
    """The actions of what has a listing in it, so that its keys work beside it too."""

    def action_search(self) -> None:
        """Open the search line."""
        self.query_one(Listing).search()

    def action_only_findings(self) -> None:
        """List only tensors with findings, or all again."""
        listing = self.query_one(Listing)
        listing.filter(findings=not listing.filters.findings)

    def action_to_tree(self) -> None:
        """Go back to the tensors."""
        self.query_one(TensorTree).focus()
