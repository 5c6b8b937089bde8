"""The memory: each module's bytes with layers folded, how uneven ranks are, and every rank's bytes as a bar."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on
from textual.reactive import var
from textual.widgets import Static

from shardviz.picture.model.holders import mask_of, ranks_in_words
from shardviz.picture.model.mesh import rank_labels
from shardviz.picture.model.palette import Coloring
from shardviz.text import bytes_text, counted

from ..keys import keys
from ..model.names import LEAST_NAME
from ..model.selection import rank_of
from ..model.usage import bar
from ..widgets.frame import Box
from ..widgets.grid import Lines
from ..widgets.listing import ModuleTree
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from shardviz.layout.mesh import Mesh

    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.tree import TreeLine
    from ..model.usage import EquallyFull, Usage


MARGIN = 6
"""Columns of a box's frame beside the text in it."""

BAR, SHORT_BAR, WIDE = 12, 4, 100
"""Columns of the longest bar, and of that in a tree narrower than so many: names need the room."""

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
1 if all hold the same. `!` marks modules whose fullest rank holds a tenth more than the mean.
"""

    BINDINGS = keys(
        "usage",
        hidden=[("o", "toggle('largest_first')", "Largest first", "Show the largest first, or the model's own order")],
    )

    largest_first = var(False, init=False)
    _usage: Usage

    def fill(self, usage: Usage) -> None:
        """Show the memory of a run; modules stay open or closed as they were."""
        self._usage = usage
        self.show_tree(usage.tree, usage.largest_first if self.largest_first else None)

    def sign(self, row: TreeLine) -> Text:
        """Return a mark if ranks hold very different amounts."""
        return Text("! " if self._usage.spread(row).imbalance >= UNEVEN else "  ", "bold")

    def about(self, row: TreeLine, column: int) -> Text:
        """Return the bytes: how many layers there are, one's on the fullest rank and the mean one, the imbalance."""
        spread, count = self._usage.spread(row), len(row.nodes)
        each = f"{count:,} × " if count > 1 else ""
        most, mean = bytes_text(round(spread.most / count)), bytes_text(round(spread.mean / count))
        share = spread.most / max(self._usage.spread().most, 1)
        gap = " " * max(self.size.width - NUMBERS - self._behind_numbers - column, 1)
        numbers = f"{each + most:>17} {mean:>9} {spread.imbalance:>9.2f}  "
        return Text.assemble(gap, numbers, (bar(share, self._bar), "dim"))

    def room_for_name(self, row: TreeLine, column: int) -> int:
        """Return the columns before the numbers, so that these stay under their heads."""
        room = self.size.width - NUMBERS - self._behind_numbers - column - 1
        return max(min(super().room_for_name(row, column), room), LEAST_NAME)

    @property
    def _bar(self) -> int:
        return BAR if self.size.width >= WIDE else SHORT_BAR

    @property
    def _behind_numbers(self) -> int:
        return self._bar + self.scrollbar_size_vertical

    def head(self) -> str:
        """Return the heads of the columns."""
        return f"{'fullest':>17} {'mean':>9} {'imbalance':>9}  ".rjust(self.size.width - self._behind_numbers)

    def watch_largest_first(self) -> None:
        """Put the largest first, or go back to the model's own order."""
        if self.count:
            self.fill(self._usage)


class MemoryView(View["Document"]):
    """Modules with their bytes above, ranks as bars below."""

    NAME = "memory"
    TITLE = "Memory"
    TOOLTIP = "The bytes of modules and ranks"
    FOCUS = "#usage"
    HELP = """\
## The memory of ranks

All that each rank holds, beside the fullest rank. Ranks that hold as much as each other are one line. To open one is
to see all tensors of its first rank, or of the one that was chosen before.
"""

    BINDINGS = keys(
        "memory",
        [
            ("f", "toggle('fullest_first')", "Fullest first", "Show the fullest ranks first, or all by number"),
            ("e", "toggle('each')", "Each rank", "Show each rank on a line of its own, or equally full ones on one"),
        ],
    )

    fullest_first = var(True, init=False)
    each = var(False, init=False)
    watch_fullest_first = watch_each = View.show_again

    _of: Usage | None = None
    _ranks: tuple[EquallyFull, ...] = ()

    def compose(self) -> ComposeResult:
        """Put the modules above, the ranks below."""
        with Box(id="usage-box"):
            yield Static(id="usage-head", markup=False, classes="legend")
            yield UsageTree(id="usage")
        with Box(id="bars-box"):
            yield Lines(id="bars")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the memory of a dump, with the cursor on the chosen rank."""
        usage = document.usage
        if usage is not self._of:
            self._of = usage
            self.query_one(UsageTree).fill(usage)
            self.on_resize()
            self.query_one("#usage-box", Box).set_titles(_title(usage), _roles(document, self.app.size.width))
        lines, ranks = self.query_one("#bars", Lines), usage.lines(self.each, self.fullest_first)
        if ranks is not self._ranks:
            self._ranks = ranks
            most, mesh = usage.spread().most, document.mesh
            lines.show(len(ranks), lambda at: rank_bar(ranks[at], most, mesh, lines.size.width))
            order = "fullest first" if self.fullest_first else "by number"
            folded = f"{counted(len(usage.total), 'rank')} on {counted(len(ranks), 'line')}: e shows each"
            below = folded if len(ranks) < len(usage.total) else ""
            self.query_one("#bars-box", Box).set_titles(f"Ranks, {order}", below)
        rank = rank_of(document, selection)
        lines.put_cursor(next((at for at, (group, _) in enumerate(ranks) if rank in group), 0))

    def on_resize(self) -> None:
        """Put the heads over their columns again."""
        self.query_one("#usage-head", Static).update(self.query_one(UsageTree).head(), layout=False)

    @on(Lines.Highlighted, "#bars")
    def _rank_chosen(self, message: Lines.Highlighted) -> None:
        ranks, _ = self._ranks[message.index]
        if self.state.selection.rank not in ranks:
            self.state.selection = replace(self.state.selection, rank=ranks[0])

    @on(Lines.Chosen, "#bars")
    def _rank_opened(self) -> None:
        self.state.action_show_view("rank")


def _title(usage: Usage) -> str:
    """Write the fullest rank, the mean and the imbalance."""
    spread = usage.spread()
    if not spread.most:
        return "Memory: the dump has no tensors that take any"
    if spread.most == spread.least:
        return f"Memory: {bytes_text(spread.most)} on every rank"
    fullest, _ = usage.lines(False, True)[0]
    who = f"{ranks_in_words(fullest, MOST_RANKS)} {'have' if len(fullest) > 1 else 'has'} most"
    mean = bytes_text(round(spread.mean))
    return f"Memory: {who}, {bytes_text(spread.most)}; mean {mean}, imbalance {spread.imbalance:.2f}"


def _roles(document: Document, width: int) -> str:
    """Write the fullest rank's bytes by role, and what a planned step adds to them."""
    usage = document.usage
    if not usage.total:
        return ""
    fullest = max(usage.total, key=lambda rank: usage.total[rank])
    kept = _shares(dict(zip(usage.table.roles, usage.table.by_rank[fullest], strict=True)))
    added = _shares({role: most for role, most in document.of_a_step.items() if most})
    text = f"{kept}; a step adds at most: {added}" if added else kept
    return text if not added or len(text) + MARGIN <= width else f"a step adds at most: {added}"


def _shares(sizes: dict[str, int]) -> str:
    return " · ".join(f"{role} {bytes_text(size)}" for role, size in sizes.items())


def rank_bar(group: EquallyFull, most: int, mesh: Mesh, width: int) -> Text:
    """Write the bytes of a rank, or of each of several, with a bar, and where they are on the mesh."""
    ranks, taken = group
    head = f"{ranks_in_words(ranks, MOST_RANKS):<{NAME}} {bytes_text(taken):>9}  "
    drawn = bar(taken / max(most, 1), max(min(width - len(head) - WHERE, 40), 4))
    where = mesh.label(ranks[0]) if len(ranks) == 1 and ranks[0] in mesh else ""
    if len(ranks) > 1:
        shared = next((label for label in rank_labels(mask_of(ranks), Coloring(mesh)) if "=" in label), "")
        where = f"{shared} · {len(ranks):,} ranks".removeprefix(" · ")
    return Text.assemble((head, "bold"), (drawn, "dim"), (f"  {where}", "dim"), no_wrap=True)
