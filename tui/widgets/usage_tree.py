"""The memory of modules as a tree, and of ranks as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on

from shardviz.picture.model.holders import mask_of, ranks_in_words
from shardviz.picture.model.mesh.labels import rank_labels
from shardviz.picture.model.palette import Colouring
from shardviz.text import bytes_text

from ..keys import keys
from ..model.usage import bar, spread_text
from .grid import Lines
from .module_tree import ModuleTree

if TYPE_CHECKING:
    from textual.binding import BindingType

    from shardviz.layout.mesh import Mesh

    from ..model.tree import TreeLine
    from ..model.usage import EquallyFull, Usage


BAR = 12
SHORT_BAR = 4
WIDE = 100
"""Columns of the longest bar, and of that in a tree narrower than so many: names need the room."""

LEAST_NAME = 8

UNEVEN = 1.1
"""An imbalance from which on a line is marked: the fullest rank holds a tenth more than the mean."""

NAME, MOST_RANKS = 22, 16
"""Columns of the names of ranks, and characters of their numbers; with more of these it is how many ranks there are."""

WHERE = 34
"""Columns kept free for where ranks are."""

NUMBERS = 39
"""Columns of the numbers behind a name."""


class UsageTree(ModuleTree):
    """Modules with the bytes of one layer on the fullest rank, the mean over the ranks, and how uneven they are."""

    HELP = """\
## The memory

The bytes of each module: of its fullest rank, and the mean over the ranks that have a part of it. Layers that are alike
are one line, `32 × 12 MiB`: both numbers are of one of them. The *imbalance* is the fullest rank's bytes over the mean:
1 where all hold the same. `!` marks those where the fullest rank holds a tenth more than the mean.
"""

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "usage", [("o", "largest_first", "Largest first", "Show the largest first, or the model's own order")]
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._usage: Usage | None = None
        self.is_sorted = False

    def fill(self, usage: Usage) -> None:
        """Show the memory of a run; modules stay open or closed as they were."""
        self._usage = usage
        self.show_tree(usage.tree, usage.largest_first if self.is_sorted else None)

    def sign(self, row: TreeLine) -> Text:
        """Return a mark where ranks hold very different amounts."""
        assert self._usage is not None
        return Text("! " if self._usage.spread(row).imbalance >= UNEVEN else "  ", "bold")

    def about(self, row: TreeLine, column: int) -> Text:
        """Return the bytes."""
        assert self._usage is not None
        spread = self._usage.spread(row)
        count, most, mean, imbalance = spread_text(spread, len(row.nodes))
        share = spread.most / max(self._usage.spread().most, 1)
        gap = " " * max(self.size.width - NUMBERS - self._behind_numbers - column, 1)
        numbers = f"{count:>7} {most:<9} {mean:>9} {imbalance:>9}  "
        return Text.assemble(gap, numbers, (bar(share, self._bar), "dim"))

    def room_for_name(self, column: int) -> int:
        """Return the columns before the numbers, so that these stay under their heads."""
        room = self.size.width - NUMBERS - self._behind_numbers - column - 1
        return max(min(super().room_for_name(column), room), LEAST_NAME)

    @property
    def _bar(self) -> int:
        return BAR if self.size.width >= WIDE else SHORT_BAR

    @property
    def _behind_numbers(self) -> int:
        return self._bar + self.scrollbar_size_vertical

    @on(Lines.Chosen)
    def _chosen(self, message: Lines.Chosen) -> None:
        row = self._visible[message.index]
        if row.entry is None:
            message.stop()
            self._open(row, on=not self._is_open(row))

    def head(self) -> str:
        """Return the heads of the columns."""
        return f"{'':>7} {'fullest':<9} {'mean':>9} {'imbalance':>9}  ".rjust(self.size.width - self._behind_numbers)

    def action_largest_first(self) -> None:
        """Put the largest first, or go back to the model's own order."""
        self.is_sorted = not self.is_sorted
        if self._usage is not None:
            self.fill(self._usage)


class RankBars(Lines):
    """The ranks with their bytes as bars."""

    HELP = """\
## The memory of ranks

All that each rank holds, beside the fullest rank. Ranks that hold as much as each other are one line. To open one is
to see all tensors of its first rank, or of the one that was chosen before.
"""


def rank_bar(group: EquallyFull, most: int, mesh: Mesh, width: int) -> Text:
    """Write the bytes of a rank, or of each of several, with a bar, and where they are on the mesh."""
    name = ranks_in_words(group.ranks, MOST_RANKS)
    head = f"{name:<{NAME}} {bytes_text(group.taken):>9}  "
    drawn = bar(group.taken / max(most, 1), max(min(width - len(head) - WHERE, 40), 4))
    return Text.assemble((head, "bold"), (drawn, "dim"), (f"  {_where(group.ranks, mesh)}", "dim"), no_wrap=True)


def _where(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """Write the coordinates of ranks, of several how many they are and those that they share."""
    if len(ranks) == 1:
        return mesh.label(ranks[0]) if ranks[0] in mesh else ""
    shared = next((label for label in rank_labels(mask_of(ranks), Colouring(mesh)) if "=" in label), "")
    return f"{shared} · {len(ranks):,} ranks".removeprefix(" · ")
