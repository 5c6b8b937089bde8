"""The three ways to see a tensor, as one clickable line: claimed, held, difference."""

from __future__ import annotations

from typing import get_args

from rich.segment import Segment

from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.picture.text.paint import Side

from ...model.messages import SideChosen
from ..grids.grid import DIM
from ..word_line import CHOSEN, Word, WordLine

GAP = "  "
SIDES: tuple[Side, ...] = get_args(Side)
TOOLTIPS = {
    "claimed": "Where the placements claim each element is",
    "held": "Where each element really is, found by its id",
    "intended": "Where the author wants each element",
    "difference": "Where the two disagree",
}
LEGENDS = {
    "claimed": ("ranks, by the placements", "by the placements", "by claims"),
    "held": ("ranks, by the ids found", "by the ids found", "by ids"),
    "intended": ("ranks, by the layout expected", "as expected"),
    "difference": ("a→b: a should hold it, b does", "a→b: a should, b does"),
}
"""How to read the labels of a side, the first that there is room for."""

NOT_KNOWN: dict[Side, tuple[str, ...]] = {
    "claimed": ("? held is not known: drawn is what is claimed", "? not known: drawn as claimed", "? as claimed"),
    "held": ("? no placements to say it: drawn is what is held", "? no placements: drawn as held", "? as held"),
}
"""Why another side is drawn than the one that is asked for."""


class SideBar(WordLine):
    """The names of the sides, the drawn one marked, and how to read its labels."""

    _side: Side = "claimed"
    _titles: tuple[str, str] = CLAIMED_AND_HELD
    _why = ""

    _drawn: Side = "claimed"

    def show(
        self, side: Side, titles: tuple[str, str] = CLAIMED_AND_HELD, drawn: Side | None = None, why: str = ""
    ) -> None:
        """Mark a side, and show its legend.

        Args:
            side: The side that is asked for.
            titles: What the two sides are.
            drawn: The side that is drawn, where that one is not known.
            why: What is wrong, where that is not where parts are.
        """
        shown = (side, titles, drawn or side, why)
        if shown != (self._side, self._titles, self._drawn, self._why):
            self._side, self._titles, self._drawn, self._why = shown
            self.refresh()

    def action_show_side(self, side: Side) -> None:
        """Ask for another side, after a click."""
        self.post_message(SideChosen(side))

    def words(self) -> list[Word]:
        """Return one word per side, and the legend."""
        sides = [
            Word(
                (Segment(f"[{title}]", CHOSEN) if side == self._side else Segment(f" {title} ", DIM),),
                f"show_side('{side}')",
                TOOLTIPS[title],
            )
            for side, title in zip(SIDES, (*self._titles, "difference"), strict=True)
        ]
        shown = dict(zip(SIDES, (*self._titles, "difference"), strict=True))[self._side]
        legends = (f"{WRONG} {self._why}",) if shown == "difference" and self._why else LEGENDS[shown]
        if self._drawn != self._side:
            legends = NOT_KNOWN[self._drawn]
        room = self.size.width - sum(word.width for word in sides) - len(GAP)
        legend = next((text for text in legends if not self.size.width or len(text) <= room), "")
        return [*sides, Word((Segment(GAP + legend, DIM),))]
