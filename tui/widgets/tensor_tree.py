"""The tensors as a tree of modules, each line with its verdict; verdicts roll up to the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on

from shardviz.picture.text.terminal import UNICODE

from ..colors import verdict_style
from ..keys import keys
from ..model.messages import TensorChosen, TensorOpened
from ..model.names import shortened
from ..model.tree import errors_first
from .grid import Lines
from .module_tree import ModuleTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.binding import BindingType

    from ..model.tree import Listed, Node, TreeLine


LEAST_NAME = 8
"""Columns of a name in the narrowest tree."""

LEAST_LAYOUT = 0.6
"""The part of a layout that is shown where not all of it fits; with less of it the name stands alone."""


class TensorTree(ModuleTree):
    """Modules that open and close, with the tensors in them; the tree remembers which are open."""

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
        "tree",
        [
            ("o", "errors_first", "Errors first", "Show what is wrong first, or the model's own order"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._entries: Sequence[Listed] = ()

    def fill(self, entries: Sequence[Listed], root: Node) -> None:
        """List the tree of some of the entries; modules stay open or closed as they were."""
        self._entries = entries
        self.show_tree(root, self._order)

    def sign(self, row: TreeLine) -> Text:
        """Return the verdict's glyph."""
        return Text.assemble((UNICODE.of(row.verdict), verdict_style(row.verdict)), " ")

    def about(self, row: TreeLine, column: int) -> Text:
        """Return a tensor's layout, and what one rank has of it where there is room."""
        if row.entry is None:
            return Text()
        entry = self._entries[row.entry]
        layout, facts = f"  {entry.short_layout}", f"  {entry.facts}"
        room = self.size.width - self.scrollbar_size_vertical - column
        if len(layout) > room:
            return Text(shortened(layout, room) if room > len(layout) * LEAST_LAYOUT else "", "dim")
        return Text(layout + facts * (len(layout) + len(facts) <= room), "dim")

    def room_for_name(self, column: int) -> int:
        """Return the columns to the edge: a layout comes behind a name that leaves room for it."""
        return max(self.size.width - self.scrollbar_size_vertical - column, LEAST_NAME)

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

    def action_errors_first(self) -> None:
        """Put what is wrong first in every module, or go back to the model's own order."""
        self.show_tree(self._root, None if self._order else errors_first)
