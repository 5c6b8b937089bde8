"""The memory: each module's bytes with layers folded, how uneven ranks are, and every rank's bytes as a bar."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual import on
from textual.widgets import Static

from shardviz.picture.model.holders import ranks_in_words
from shardviz.text import bytes_text, counted

from ..keys import keys
from ..model.selection import rank_of
from ..widgets.box import Box
from ..widgets.grid import Lines
from ..widgets.usage_tree import MOST_RANKS, RankBars, UsageTree, rank_bar
from .view import View

if TYPE_CHECKING:
    from rich.text import Text
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from ..model.document import Document
    from ..model.selection import Selection
    from ..model.usage import EquallyFull, Usage
    from .view import State


MARGIN = 6
"""Columns of a box's frame beside the text in it."""


class MemoryView(View):
    """Modules with their bytes above, ranks as bars below."""

    NAME = "memory"
    TITLE = "Memory"
    TOOLTIP = "The bytes of modules and ranks"
    FOCUS = "#usage"

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "memory",
        [
            ("f", "fullest_first", "Fullest first", "Show the fullest ranks first, or all by number"),
            ("e", "each_rank", "Each rank", "Show each rank on a line of its own, or those that hold as much on one"),
        ],
        show=True,
    )

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._of: Usage | None = None
        self._fullest_first = True
        self._each_rank = False
        self._listed: tuple[Usage, bool, bool] | None = None
        self._ranks: tuple[EquallyFull, ...] = ()

    def compose(self) -> ComposeResult:
        """Put the modules above, the ranks below."""
        with Box(id="usage-box"):
            yield Static(id="usage-head", markup=False, classes="legend")
            yield UsageTree(id="usage")
        with Box(id="bars-box"):
            yield RankBars(id="bars")

    def chosen(self, selection: Selection) -> object:
        """Return the chosen rank."""
        return selection.rank

    def show(self, document: Document | None, selection: Selection) -> None:
        """Show the memory of a dump, with the cursor on the chosen rank."""
        if document is None:
            return
        usage = document.usage
        if usage is not self._of:
            self._of = usage
            tree = self.query_one(UsageTree)
            tree.fill(usage)
            self.query_one("#usage-head", Static).update(tree.head(), layout=False)
            self.query_one("#usage-box", Box).set_titles(_title(usage), _roles(document, usage, self.app.size.width))
        self._show_ranks(document, usage, rank_of(document, selection))

    def on_resize(self) -> None:
        """Put the heads over their columns again."""
        self.query_one("#usage-head", Static).update(self.query_one(UsageTree).head(), layout=False)

    def _show_ranks(self, document: Document, usage: Usage, rank: int) -> None:
        listed, lines = (usage, self._fullest_first, self._each_rank), self.query_one(RankBars)
        if self._listed is None or self._listed[0] is not usage or self._listed[1:] != listed[1:]:
            self._listed = listed
            self._list(document, usage, lines)
        lines.put_cursor(next((at for at, group in enumerate(self._ranks) if rank in group.ranks), 0))

    def _list(self, document: Document, usage: Usage, lines: RankBars) -> None:
        if self._fullest_first:
            self._ranks = usage.each_fullest_first if self._each_rank else usage.fullest_first
        else:
            self._ranks = usage.each_rank if self._each_rank else usage.equally_full
        most, mesh = usage.spread().most, document.dump.files.mesh

        def line(at: int) -> Text:
            return rank_bar(self._ranks[at], most, mesh, lines.size.width)

        lines.show(len(self._ranks), line)
        order = "fullest first" if self._fullest_first else "by number"
        self.query_one("#bars-box", Box).set_titles(f"Ranks, {order}", _folded(len(usage.ranks), len(self._ranks)))

    @on(Lines.Highlighted, "#bars")
    def _rank_chosen_here(self, message: Lines.Highlighted) -> None:
        ranks = self._ranks[message.index].ranks
        if self.state.selection.rank not in ranks:
            self.state.selection = replace(self.state.selection, rank=ranks[0])

    @on(Lines.Chosen, "#bars")
    async def _rank_opened(self) -> None:
        await self.state.action_show_view("rank")

    def action_fullest_first(self) -> None:
        """Sort the ranks by their bytes, or by their numbers."""
        self._fullest_first = not self._fullest_first
        self.show(self.state.document, self.state.selection)

    def action_each_rank(self) -> None:
        """Show each rank on a line of its own, or those that hold as much on one."""
        self._each_rank = not self._each_rank
        self.show(self.state.document, self.state.selection)


def _folded(num_ranks: int, num_lines: int) -> str:
    """Say how many ranks the lines stand for, where that is not one each."""
    if num_lines == num_ranks:
        return ""
    return f"{counted(num_ranks, 'rank')} on {counted(num_lines, 'line')}: e shows each"


def _title(usage: Usage) -> str:
    """Write the fullest rank, the mean and the imbalance."""
    spread = usage.spread()
    if not spread.most:
        return "Memory: the dump has no tensors that take any"
    if spread.most == spread.least:
        return f"Memory: {bytes_text(spread.most)} on every rank"
    fullest = max(usage.equally_full, key=lambda group: group.taken).ranks
    who = f"{ranks_in_words(fullest, MOST_RANKS)} {'have' if len(fullest) > 1 else 'has'} most"
    mean = bytes_text(round(spread.mean))
    return f"Memory: {who}, {bytes_text(spread.most)}; mean {mean}, imbalance {spread.imbalance:.2f}"


def _roles(document: Document, usage: Usage, width: int) -> str:
    """Write the fullest rank's bytes by role, and what a planned step adds to them."""
    if not usage.total.size:
        return ""
    at = int(np.argmax(usage.total))
    kept = {role: int(taken[at]) for role, taken in usage.by_role.items()}
    added = {role: most for role, most in document.of_a_step.items() if most}
    if not added:
        return _shares(kept)
    text = f"{_shares(kept)}; a step adds at most: {_shares(added)}"
    return text if len(text) + MARGIN <= width else f"a step adds at most: {_shares(added)}"


def _shares(sizes: dict[str, int]) -> str:
    return " · ".join(f"{role} {bytes_text(size)}" for role, size in sizes.items())
