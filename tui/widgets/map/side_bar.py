"""The three ways to see a tensor, as one clickable line: claimed, held, difference."""

from __future__ import annotations

from typing import get_args

from rich.segment import Segment

from shardviz.picture.text.paint import Side

from ...model.messages import SideChosen
from ..grid import DIM
from ..word_line import CHOSEN, Word, WordLine

SIDES: tuple[Side, ...] = get_args(Side)
TOOLTIPS: dict[Side, str] = {
    "claimed": "Where the placements claim each element is",
    "held": "Where each element really is, found by its id",
    "difference": "Where the two disagree",
}
LEGENDS: dict[Side, str] = {
    "claimed": "ranks, by the placements",
    "held": "ranks, by the ids found",
    "difference": "1→4: on 4, not on 1",
}


class SideBar(WordLine):
    """The names of the sides, the drawn one marked, and how to read its labels."""

    _side: Side = "claimed"

    def show(self, side: Side) -> None:
        """Mark the side that is drawn, and show its legend."""
        if side != self._side:
            self._side = side
            self.refresh()

    def action_show_side(self, side: Side) -> None:
        """Ask for another side, after a click."""
        self.post_message(SideChosen(side))

    def words(self) -> list[Word]:
        """Return one word per side, and the legend."""
        sides = [
            Word(
                (Segment(f"[{side}]", CHOSEN) if side == self._side else Segment(f" {side} ", DIM),),
                f"show_side('{side}')",
                TOOLTIPS[side],
            )
            for side in SIDES
        ]
        return [*sides, Word((Segment(f"  {LEGENDS[self._side]}", DIM),))]
