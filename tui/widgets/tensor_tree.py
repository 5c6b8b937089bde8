"""The tensors as a tree of modules, each line with its verdict; verdicts roll up to the modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on

from shardviz.check.verdicts import worst
from shardviz.picture.text.terminal import UNICODE

from ..colours import verdict_style
from ..keys import keys
from ..model.messages import TensorChosen, TensorOpened
from ..model.names import shortened
from .lines import Lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from textual import events
    from textual.binding import BindingType

    from shardviz.check.verdicts import Verdict

    from ..model.document import TensorEntry
    from ..model.stored import StoredEntry

    Listed = TensorEntry | StoredEntry

ModulePath = tuple[str, ...]

_PARTS = re.compile(r"[^.\[]*\[[^\]]*\][^.]*|[^.]+")
MOST_NAME = 60
MOST_OPEN = 64
"""With more tensors than this, only modules with errors are open at first."""


@dataclass
class Branch:
    """The parts of a module, in model order: modules by their name, entries by their index (these have no parts)."""

    parts: dict[str | int, Branch] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeLine:
    """One line of the tree.

    Attributes:
        path: The names from the root down.
        verdict: The worst verdict in it.
        entry: The tensor's entry; None for a module.
        layout: The layout that a tensor claims; empty for a module.
    """

    path: ModulePath
    verdict: Verdict
    entry: int | None = None
    layout: str = ""


class TensorTree(Lines):
    """Modules that open and close, with the tensors in them; the tree remembers which are open."""

    HELP = """\
## The tensors

Every tensor of the model under its module, with the layout that its placements claim: `12/tp/fsdp` is a dim of 12,
split over the mesh axis tp and each part again over fsdp. Identical layers are one line: `layers.[0-31]`.

- `✗` wrong numbers, `!` a warning, `?` not checked, `✓` in order; a module shows the worst in it.
- **enter** goes to the map of a tensor, and opens or closes a module, as **right** and **left** do.
- **/** searches, **f** shows only tensors with findings.
"""

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "tree",
        [
            ("right", "open(True)", "Open module", "Open this module"),
            ("left", "open(False)", "Close module", "Close this module, or go to the one around it"),
        ],
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: list[TreeLine] = []
        self._visible: list[TreeLine] = []
        self._opened: dict[ModulePath, bool] = {}
        self._open_all = True
        self._is_nested = False

    def fill(self, entries: Sequence[Listed], shown: Iterable[int]) -> None:
        """List some of the entries, given by their indices; modules stay open or closed as they were."""
        indices = list(shown)
        self._open_all = len(indices) <= MOST_OPEN
        self._rows = list(_rows(entries, indices))
        self._is_nested = len(self._rows) > len(indices)
        self._list(self._visible[self.cursor] if self.cursor < len(self._visible) else None)

    def choose(self, entry: int) -> None:
        """Put the cursor on an entry, if it is listed, and open the modules around it."""
        row = next((row for row in self._rows if row.entry == entry), None)
        if row is None or (self.cursor < len(self._visible) and self._visible[self.cursor] is row):
            return
        self._opened |= {row.path[:depth]: True for depth in range(1, len(row.path))}
        self._list(row)

    def _is_open(self, row: TreeLine) -> bool:
        return self._opened.get(row.path, self._open_all or row.verdict == "error")

    def _list(self, current: TreeLine | None) -> None:
        """List the lines in open modules, with the cursor on one of them, or on the closed module around it."""
        self._visible, closed = [], None
        for row in self._rows:
            if closed is None or row.path[: len(closed)] != closed:
                self._visible.append(row)
                closed = row.path if row.entry is None and not self._is_open(row) else None
        paths = [(row.path, row.entry) for row in self._visible]
        cursor = paths.index((current.path, current.entry)) if current and (current.path, current.entry) in paths else 0
        self.show(len(self._visible), self._text, cursor)

    def _text(self, index: int) -> Text:
        row = self._visible[index]
        depth = len(row.path) - 1
        mark = "  " * (self._is_nested and not depth) if row.entry is not None else "▾ " if self._is_open(row) else "▸ "
        name = shortened(row.path[-1], MOST_NAME)
        line = Text.assemble(("│ " * depth, "dim"), mark, no_wrap=True)
        line.append(UNICODE.of(row.verdict), verdict_style(row.verdict)).append(f" {name}")
        return line.append(f"  {row.layout}", "dim") if row.layout else line

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        message.stop()
        entry = self._visible[message.index].entry
        if entry is not None:
            self.post_message(TensorChosen(entry))

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
        if not self._visible:
            return
        row = self._visible[self.cursor]
        if row.entry is None and on != self._is_open(row):
            self._open(row, on=on)
        elif not on:
            around = [index for index, other in enumerate(self._visible) if other.path == row.path[:-1]]
            self.action_move((around or [self.cursor])[0] - self.cursor)

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


def _rows(entries: Sequence[Listed], indices: Iterable[int]) -> Iterator[TreeLine]:
    """Yield the lines of a tree, each module before its parts."""
    root = Branch()
    for index in indices:
        module = root
        parts: list[str | int] = [*_path(entries[index])[:-1], index]
        for part in parts:
            module = module.parts.setdefault(part, Branch())
    yield from _within(root, (), entries)


def _within(module: Branch, path: ModulePath, entries: Sequence[Listed]) -> Iterator[TreeLine]:
    for key, part in module.parts.items():
        if isinstance(key, int):
            yield TreeLine((*path, _path(entries[key])[-1]), entries[key].verdict, key, entries[key].short_layout)
        else:
            inside = list(_within(part, (*path, key), entries))
            yield TreeLine((*path, key), worst([row.verdict for row in inside]))
            yield from inside


def _path(entry: Listed) -> ModulePath:
    """Split a title into modules at its dots; numbers and folds of numbers stay with the module before them.

    An optimizer's state of a parameter, `weight.exp_avg`, is beside that parameter.
    """
    parts: list[str] = []
    for part in _PARTS.findall(entry.title):
        if parts and (part.isdigit() or part.startswith("[")):
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    if entry.is_state and len(parts) > 1:
        parts[-2:] = [".".join(parts[-2:])]
    return tuple(parts) or ("(no name)",)
