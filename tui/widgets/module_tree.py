"""A tree of modules that open and close, in which alike layers are one line or stand apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on

from ..keys import keys
from ..model.names import shortened
from ..model.tree import Node, TreeLines, layer_of
from .grid import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual import events
    from textual.binding import BindingType

    from ..model.tree import Apart, ModulePath, TreeLine


MOST_NAME = 60
MOST_OPEN = 64
"""With more lines than this, only modules with errors are open at first."""


class ModuleTree(Lines):
    """Modules with what is in them; the tree remembers which are open. Subclasses say what a line is about."""

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "tree",
        hidden=[
            ("right,l", "open(True)", "Open module", "Open this module"),
            ("left,h", "open(False)", "Close module", "Close this module, or go to the one around it"),
            ("u", "each_layer", "Each layer", "Show each of these layers on its own, or alike ones as one"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.order: Callable[[Sequence[Node]], float] | None = None
        self._root = Node()
        self._known = TreeLines(self._root)
        self._every: list[TreeLine] = []
        self._visible: list[TreeLine] = []
        self._opened: dict[ModulePath, bool] = {}
        self._apart: Apart = frozenset()

    def sign(self, row: TreeLine) -> Text:
        """Return what stands before a line's name."""
        raise NotImplementedError

    def about(self, row: TreeLine, column: int) -> Text:
        """Return what stands behind a line's name, which ends at a column."""
        raise NotImplementedError

    def opened(self, row: TreeLine) -> None:
        """Do what enter does on a tensor; a module opens or closes."""

    def show_tree(self, root: Node, order: Callable[[Sequence[Node]], float] | None = None) -> None:
        """Show a tree, with the cursor on the same line as before, or on another of the same tensors or layers."""
        self._root, self.order = root, order
        self._arrange()

    def _arrange(self) -> None:
        before = self.at_cursor
        self._known = TreeLines(self._root, self._apart, self.order)
        self._every = self._known.listed(lambda _: True)
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
            self._opened |= {row.path[:depth]: True for depth in range(1, len(row.path))}
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
        self._visible = self._known.listed(self._is_open)
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
        line.append(shortened(row.path[-1].rstrip(), self.room_for_name(line.cell_len)))
        return line.append_text(self.about(row, line.cell_len))

    def room_for_name(self, column: int) -> int:
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
            self.opened(row)

    def _toggle(self, row: TreeLine) -> None:
        self._opened[row.path] = not self._is_open(row)
        self._list(row)
