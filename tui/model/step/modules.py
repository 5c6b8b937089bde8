"""The modules of a step as the step's screen lists them: which calls are open, and the card of the chosen one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rich.text import Text

from shardviz.picture.model.step_heat import step_heats
from shardviz.picture.model.step_tree import SHORT, SIDES, StepTree, key_of, step_tree
from shardviz.picture.text.step_tree import heat_lines, node_line, side_text
from shardviz.picture.text.terminal import BAD, UNICODE
from shardviz.text import printable

if TYPE_CHECKING:
    from shardviz.picture.model.step_heat import StepHeat
    from shardviz.picture.model.step_tree import Node

    from ..document import Document


@dataclass(frozen=True)
class Modules:
    """The calls of a step, some of them open.

    Attributes:
        tree: The calls.
        opened: Those that are open, by module and number.
        heats: What ranks have at the first wrong place, beside what is due.
    """

    tree: StepTree
    opened: frozenset[tuple[str, int]]
    heats: tuple[StepHeat, ...] = field(default=(), repr=False)

    @cached_property
    def lines(self) -> list[Node]:
        """The calls that are seen."""
        return self.tree.lines(self.opened)

    @property
    def first(self) -> int:
        """The line of the first wrong call; 0 where there is none."""
        return next((at for at, node in enumerate(self.lines) if node.is_first), 0)

    def toggled(self, at: int) -> Modules:
        """Return the calls with the one of a line opened, or closed if it was open."""
        key = key_of(self.lines[at])
        return replace(self, opened=self.opened ^ {key})

    def line(self, at: int) -> Text:
        """Write a line."""
        node = self.lines[at]
        return node_line(node, UNICODE, is_open=key_of(node) in self.opened)

    def card(self, at: int) -> Text:
        """Write what is known of the call of a line: its sides, and its numbers where it is the first wrong one."""
        node = self.lines[at]
        rows = [f"{SHORT[side]:<9} {printable(side_text(node, side))}" for side in SIDES]
        parts = [Text(row, BAD if node.call.is_bad(side) else "") for row, side in zip(rows, SIDES, strict=True)]
        for heat in self.heats if node.is_first else ():
            parts += [Text(""), *heat_lines(heat, UNICODE)]
        return Text("\n").join(parts)


def modules_of(document: Document) -> Modules:
    """Return the modules of a document's step, those around the first wrong one open."""
    tree = step_tree(document.dump, document.findings)
    heats = tuple(step_heats(document.dump)) if tree.finding is not None else ()
    return Modules(tree, tree.opened, heats)
