"""A tree of modules that open and close, in which alike layers are one line or stand apart."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

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
        [
            ("right,l", "open(True)", "Open module", "Open this module"),
            ("left,h", "open(False)", "Close module", "Close this module, or go to the one around it"),
            ("u", "each_layer", "Each layer", "Show each of these layers on its own, or alike ones as one"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._root = Node()
        self._known = TreeLines(self._root)
        self._visible: list[TreeLine] = []
        self._opened: dict[ModulePath, bool] = {}
        self._apart: Apart = frozenset()
        self._open_all = True
        self._is_nested = False
        self._order: Callable[[Sequence[Node]], float] | None = None

    def sign(self, row: TreeLine) -> Text:
        """Return what stands before a line's name."""
        raise NotImplementedError

    def about(self, row: TreeLine, column: int) -> Text:
        """Return what stands behind a line's name, which ends at a column."""
        raise NotImplementedError

    def show_tree(self, root: Node, order: Callable[[Sequence[Node]], float] | None = None) -> None:
        """Show a tree, with the cursor on the same line as before, or on another of the same tensors or layers."""
        self._root, self._order = root, order
        self._arrange()

    def _arrange(self) -> None:
        before = self.at_cursor
        self._known = TreeLines(self._root, self._apart, self._order)
        modules = count()
        lines = self._lines(lambda _: next(modules) < MOST_OPEN)  # as many as show that there are more
        self._open_all = len(lines) <= MOST_OPEN
        self._is_nested = any(line.entry is None for line in lines)
        self._list(before)

    @property
    def at_cursor(self) -> TreeLine | None:
        """The line under the cursor; None where there is none."""
        return self._visible[self.cursor] if self.cursor < len(self._visible) else None

    def choose(self, entry: int, name: str = "") -> None:
        """Put the cursor on an entry, if it is listed, and open the modules around it."""
        current = self.at_cursor
        if current is not None and current.entry == entry and (not name or name in current.names):
            return
        at = next((at for at, row in enumerate(self._visible) if row.entry == entry and name in row.names), None)
        if at is not None:
            self._open_around(self._visible[at])
            self.put_cursor(at)
            return
        rows = [row for row in self._lines_around(lambda node: node.entry == entry) if row.entry == entry]
        row = next((row for row in rows if name in row.names), rows[0] if rows else None)
        if row is not None:
            self._open_around(row)
            self._list(row)

    def _open_around(self, row: TreeLine) -> None:
        self._opened |= {row.path[:depth]: True for depth in range(1, len(row.path))}

    def set_apart(self, name: str) -> None:
        """Let the layer that a name is in stand on its own."""
        layer = layer_of(name)
        if layer is not None and layer not in self._apart:
            self._apart |= {layer}
            self._arrange()

    def _is_open(self, row: TreeLine) -> bool:
        return self._opened.get(row.path, self._open_all or row.verdict == "error")

    def _list(self, current: TreeLine | None) -> None:
        """List the lines in open modules, with the cursor on one of them, or on the closed module around it."""
        self._visible = self._lines(self._is_open)
        self.show(len(self._visible), self._text, self._place_of(current))

    def _place_of(self, line: TreeLine | None) -> int:
        """Return where a line is now, or the closed module around it; its layer may have been set apart since."""
        if line is None:
            return 0
        shown = (at for at, row in enumerate(self._visible) if (row.path, row.entry) == (line.path, line.entry))
        if (at := next(shown, None)) is not None:
            return at
        name = line.names[0] if line.names else ""
        there = self._lines(lambda row: row.path == line.path[: len(row.path)])
        row = next((row for row in there if (row.path, row.entry) == (line.path, line.entry)), None)
        if row is None and name:
            row = next((row for row in self._lines_around(lambda node: name in node.names) if name in row.names), None)
        elif row is None:
            row = next((row for row in there if row.key == line.key), None)
        places = {row.path: at for at, row in reversed([*enumerate(self._visible)])}
        around = (row.path[:depth] for depth in range(len(row.path), 0, -1)) if row else ()
        return next((places[path] for path in around if path in places), 0)

    def _lines_around(self, is_wanted: Callable[[Node], bool]) -> list[TreeLine]:
        """Return the lines of some tensors, with those of the modules around them and what else these have."""
        around = _modules_with(self._root, is_wanted)
        return self._lines(lambda row: any(id(node) in around for node in row.nodes))

    def _lines(self, is_open: Callable[[TreeLine], bool]) -> list[TreeLine]:
        return self._known.listed(is_open)

    def _text(self, index: int) -> Text:
        row = self._visible[index]
        depth = len(row.path) - 1
        mark = "  " * (self._is_nested and not depth) if row.entry is not None else "▾ " if self._is_open(row) else "▸ "
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
            self._open(row, on=on)
        elif not on:
            around = [index for index, other in enumerate(self._visible) if other.path == row.path[:-1]]
            self.action_move((around or [self.cursor])[0] - self.cursor)

    def action_each_layer(self) -> None:
        """Let each of the layers under the cursor stand on its own; if they do, fold alike ones again."""
        around = self._layers_around()
        if around is None:
            return
        apart = frozenset(layer for layer in self._apart if layer[0] != around.key)
        folded = apart if len(apart) < len(self._apart) and around.count == 1 else apart | {(around.key, None)}
        self._apart = folded
        self._arrange()

    def _layers_around(self) -> TreeLine | None:
        """Return the nearest module around the cursor that is one of several, or several."""
        row = self.at_cursor
        while row is not None and row.number is None:
            path = row.path[:-1]
            row = next((other for other in self._visible if other.path == path), None)
        return row

    def on_click(self, event: events.Click) -> None:
        """Put the cursor under the mouse; open or close a module; a second click goes to a tensor's map."""
        super().on_click(event)
        if event.chain == 1 and event.y + self.scroll_offset.y < self.count:
            row = self._visible[self.cursor]
            if row.entry is None:
                self._open(row, on=not self._is_open(row))

    def _open(self, row: TreeLine, *, on: bool) -> None:
        self._opened[row.path] = on
        self._list(row)


def _modules_with(root: Node, is_wanted: Callable[[Node], bool]) -> set[int]:
    """Return the ids of the modules that have a tensor of some kind in them."""
    modules: set[int] = set()

    def has(node: Node) -> bool:
        inside = [is_wanted(part) if part.entry is not None else has(part) for part in node.parts.values()]
        if True in inside:
            modules.add(id(node))
        return True in inside

    has(root)
    return modules
