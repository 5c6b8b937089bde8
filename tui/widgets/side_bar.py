"""The three ways to see a tensor, as one clickable line: claimed, held, difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from textual.containers import Horizontal
from textual.widgets import Label, Static

from shardviz.picture.paint import Side

from ..messages import SideChosen

if TYPE_CHECKING:
    from textual import events
    from textual.app import ComposeResult

SIDES: tuple[Side, ...] = get_args(Side)
TOOLTIPS: dict[Side, str] = {
    "claimed": "Where the placements say that each element is",
    "held": "Where each element really is, by its id",
    "difference": "Where the two disagree",
}
LEGENDS: dict[Side, str] = {
    "claimed": "ranks, by the placements",
    "held": "ranks, by the ids found",
    "difference": "1→4: put on 1, found on 4",
}


class SideBar(Horizontal):
    """The line."""

    _side: Side | None = None

    def compose(self) -> ComposeResult:
        """Make a label a side."""
        for side in SIDES:
            yield SideLabel(side)
        yield Static("", id="legend", markup=False)

    def show(self, side: Side) -> None:
        """Mark the side that is drawn, and say how to read it."""
        if side == self._side:
            return
        self._side = side
        self.query_one("#legend", Static).update(LEGENDS[side], layout=False)
        for label in self.query(SideLabel):
            label.set_class(label.side == side, "chosen")
            label.update(f"[{label.side}]" if label.side == side else f" {label.side} ", layout=False)


class SideLabel(Label):
    """One side's name."""

    def __init__(self, side: Side) -> None:
        super().__init__(f" {side} ", markup=False, id=f"side-{side}")
        self.side = side
        self.tooltip = TOOLTIPS[side]

    def on_click(self, event: events.Click) -> None:
        """Ask for this side."""
        event.stop()
        self.post_message(SideChosen(self.side))
