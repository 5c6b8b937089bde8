"""The tensors as a tree of modules, each line with its verdict; verdicts roll up to the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on

from shardviz.picture.text.terminal import UNICODE

from ..colours import verdict_style
from ..keys import keys
from ..model.messages import TensorChosen, TensorOpened
from ..model.names import shortened
from ..model.tree import Node, layer_of, lines_of, tree_of
from .lines import Lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual import events
    from textual.binding import BindingType

    from ..model.tree import Apart, Listed, ModulePath, TreeLine

MOST_NAME = 60
MOST_OPEN = 64
"""With more lines than this, only modules with errors are open at first."""


class TensorTree(Lines):
    """Modules that open and close, with the tensors in them; the tree remembers which are open."""

    HELP = """\
## The tensors

Every tensor of the model under its module, with the layout that its placements claim: `12/tp/fsdp` is a dim of 12,
split over the mesh axis tp and each part again over fsdp. Behind it are the shape and the bytes of one rank's part.

`✗` wrong numbers, `!` a warning, `?` not checked, `✓` in order; a module shows the worst in it.

Layers that are alike all through are one line, `layers.[0-31]`. A layer that differs in anything stands whole beside
them, and so does one that you search for or go to.
"""

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "tree",
        [
            ("right,l", "open(True)", "Open module", "Open this module"),
            ("left,h", "open(False)", "Close module", "Close this module, or go to the one around it"),
            ("u", "each_layer", "Each layer", "Show each of these layers on its own, or alike ones as one"),
            ("o", "errors_first", "Errors first", "Show what is wrong first, or the model's own order"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._entries: Sequence[Listed] = ()
        self._root = Node()
        self._rows: list[TreeLine] = []
        self._visible: list[TreeLine] = []
        self._opened: dict[ModulePath, bool] = {}
        self._apart: Apart = frozenset()
        self._open_all = True
        self._is_nested = False
        self.is_sorted = False

    def fill(
        self, entries: Sequence[Listed], shown: Iterable[int], keep: Callable[[int, str], bool] | None = None
    ) -> None:
        """List some of the entries, given by their indices; modules stay open or closed as they were.

        Args:
            entries: All entries.
            shown: The indices of those that are listed.
            keep: Whether one of an entry's names is listed; all are by default.
        """
        self._entries, self._root = entries, tree_of(entries, shown, keep)
        self._arrange()

    def _arrange(self) -> None:
        """Make the lines again, with the cursor on the same one, or on another that has the same tensors."""
        before = self._at_cursor
        self._rows = lines_of(self._root, self._apart, errors_first=self.is_sorted)
        self._open_all = len(self._rows) <= MOST_OPEN
        self._is_nested = any(row.entry is None for row in self._rows)
        self._list(before)

    @property
    def _at_cursor(self) -> TreeLine | None:
        return self._visible[self.cursor] if self.cursor < len(self._visible) else None

    def choose(self, entry: int, name: str = "") -> None:
        """Put the cursor on an entry, if it is listed, and open the modules around it."""
        current = self._at_cursor
        if current is not None and current.entry == entry and (not name or name in current.names):
            return
        found = [row for row in self._rows if row.entry == entry]
        row = next((row for row in found if name in row.names), found[0] if found else None)
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
        return self._opened.get(row.path, self._open_all or row.verdict == "error")

    def _list(self, current: TreeLine | None) -> None:
        """List the lines in open modules, with the cursor on one of them, or on the closed module around it."""
        self._visible, closed = [], None
        for row in self._rows:
            if closed is None or row.path[: len(closed)] != closed:
                self._visible.append(row)
                closed = row.path if row.entry is None and not self._is_open(row) else None
        self.show(len(self._visible), self._text, self._place_of(current))

    def _place_of(self, line: TreeLine | None) -> int:
        """Return where a line is now, or the closed module around it; its layer may have been set apart since."""
        if line is None:
            return 0
        name = line.names[0] if line.names else ""
        same = (row for row in self._rows if (row.path, row.entry) == (line.path, line.entry))
        alike = (row for row in self._rows if (name in row.names if name else row.key == line.key))
        row = next(same, next(alike, None))
        places = {row.path: at for at, row in reversed([*enumerate(self._visible)])}
        around = (row.path[:depth] for depth in range(len(row.path), 0, -1)) if row else ()
        return next((places[path] for path in around if path in places), 0)

    def _text(self, index: int) -> Text:
        row = self._visible[index]
        depth = len(row.path) - 1
        mark = "  " * (self._is_nested and not depth) if row.entry is not None else "▾ " if self._is_open(row) else "▸ "
        name = shortened(row.path[-1].rstrip(), MOST_NAME)
        line = Text.assemble(("│ " * depth, "dim"), mark, no_wrap=True)
        line.append(UNICODE.of(row.verdict), verdict_style(row.verdict)).append(f" {name}")
        if row.entry is None:
            return line
        entry = self._entries[row.entry]
        line.append(f"  {entry.short_layout}", "dim")
        return line.append(f"  {entry.facts}", "dim") if entry.facts else line

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        message.stop()
        row = self._visible[message.index]
        if row.entry is not None:
            self.post_message(TensorChosen(row.entry, row.names[0]))

    @on(Lines.Chosen)
    def _chosen(self, message: Lines.Chosen) -> None:
        message.stop()
        row = self._visible[message.index]
        if row.entry is not None:
            self.post_message(TensorOpened(row.entry))
        else:
            self._open(row, on=not self._is_open(row))

    def action_open(self, on: bool) -> None:
        """Open or close the module under the cursor; on a tensor, go to its module."""
        row = self._at_cursor
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
        apart = frozenset(one for one in self._apart if one[0] != around.key)
        folded = apart if len(apart) < len(self._apart) and around.count == 1 else apart | {(around.key, None)}
        self._apart = folded
        self._arrange()

    def _layers_around(self) -> TreeLine | None:
        """Return the nearest module around the cursor that is one of several, or several."""
        row = self._at_cursor
        while row is not None and row.number is None:
            path = row.path[:-1]
            row = next((other for other in self._rows if other.path == path), None)
        return row

    def action_errors_first(self) -> None:
        """Put what is wrong first in every module, or go back to the model's own order."""
        self.is_sorted = not self.is_sorted
        self._arrange()

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
