"""The tensors as a tree of modules, each line with its verdict; verdicts roll up to the modules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on
from textual.widgets import Tree

from ..colours import verdict_style
from ..document import GLYPHS, Entry, Verdict, worst
from ..messages import TensorChosen, TensorOpened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widgets.tree import TreeNode

_PARTS = re.compile(r"[^.\[]*\[[^\]]*\][^.]*|[^.]+")
MOST_CHARACTERS = 60


class TensorTree(Tree[int]):
    """The tree; a leaf's data is the entry's index."""

    HELP = """\
## The tensors

Every tensor of the model under its module, with the layout that its placements claim: `12/tp/fsdp` is a dim of 12,
split over the mesh axis tp and each part again over fsdp. Identical layers stand together: `layers.[0-31]`.

- `✗` wrong numbers, `!` a warning, `?` not checked, `✓` in order; a module shows the worst of what is in it.
- **enter** goes to the map of a tensor, **/** searches, **f** shows only those with findings.
"""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__("model", id=id)
        self.show_root = False
        self.guide_depth = 2
        self._leaves: dict[int, TreeNode[int]] = {}
        self._awaited: int | None = None

    def show(self, entries: Sequence[Entry], shown: Iterable[int]) -> None:
        """Show some of the entries, given by their indices."""
        self.clear()
        self._leaves = {}
        found = list(shown)
        verdicts = _rolled_up([(_path(entries[index]), entries[index].verdict) for index in found])
        nodes: dict[tuple[str, ...], TreeNode[int]] = {(): self.root}
        for index in found:
            path = _path(entries[index])
            for depth in range(1, len(path)):
                module = path[:depth]
                if module not in nodes:
                    label = _line(verdicts[module], path[depth - 1])
                    nodes[module] = nodes[module[:-1]].add(
                        label, expand=len(found) <= 64 or verdicts[module] == "error"
                    )
            label = _line(entries[index].verdict, path[-1], entries[index].layout)
            self._leaves[index] = nodes[path[:-1]].add_leaf(label, data=index)

    def choose(self, entry: int) -> None:
        """Put the cursor on an entry, if it is shown."""
        node = self._leaves.get(entry)
        if node is None or (node is self.cursor_node and self._awaited is None):
            return
        self._awaited = entry
        parent = node.parent
        while parent is not None:
            parent.expand()
            parent = parent.parent
        self.call_after_refresh(self.move_cursor, node)

    @on(Tree.NodeHighlighted)
    def _highlighted(self, event: Tree.NodeHighlighted[int]) -> None:
        """Say what was chosen; where the tree itself put the cursor while it was filled, nobody chose."""
        event.stop()
        if self._awaited is not None:
            if event.node.data == self._awaited:
                self._awaited = None
        elif event.node.data is not None:
            self.post_message(TensorChosen(event.node.data))

    @on(Tree.NodeSelected)
    def _selected(self, event: Tree.NodeSelected[int]) -> None:
        event.stop()
        if event.node.data is not None:
            self.post_message(TensorOpened(event.node.data))


def _path(entry: Entry) -> tuple[str, ...]:
    """Cut a title into modules at its dots; numbers and folds of numbers stay with the module before them."""
    parts: list[str] = []
    for part in _PARTS.findall(entry.title):
        if parts and (part.isdigit() or part.startswith("[")):
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return tuple(parts) or ("(no name)",)


def _line(verdict: Verdict, name: str, layout: str = "") -> Text:
    short = name if len(name) <= MOST_CHARACTERS else name[: MOST_CHARACTERS - 1] + "…"
    line = Text.assemble((GLYPHS[verdict], verdict_style(verdict)), " ", short, no_wrap=True)
    return line.append(f"  {layout}", "dim") if layout else line


def _rolled_up(leaves: Iterable[tuple[tuple[str, ...], Verdict]]) -> dict[tuple[str, ...], Verdict]:
    found: dict[tuple[str, ...], Verdict] = {}
    for path, verdict in leaves:
        for depth in range(1, len(path)):
            found[path[:depth]] = worst([verdict, found.get(path[:depth], "clean")])
    return found
