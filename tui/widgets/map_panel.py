"""The map with its parts: the sides above, the mesh beside it if there is room, the element below."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast, get_args

from rich.segment import Segment

from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.picture.text.paint import Side

from ..keys import keys
from ..model.selection import Picked, Selection, name_of, next_plane, next_slice
from .frame import CHOSEN, Box, Word, WordLine
from .grid import DIM
from .mesh_grid import LEGEND, MeshGrid, drawn_side, lights_of
from .tensor_map import Inspector, TensorMap, hovered

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..app import ShardvizApp
    from ..model.document import Document


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

    _shown: tuple[Side, tuple[str, str], Side, str] = ("claimed", CLAIMED_AND_HELD, "claimed", "")

    def show(self, side: Side, titles: tuple[str, str], drawn: Side, why: str = "") -> None:
        """Mark a side, and show its legend.

        Args:
            side: The side that is asked for.
            titles: What the two sides are.
            drawn: The side that is drawn, as that one may not be known.
            why: What is wrong, where that is not where parts are.
        """
        if self._shown != (side, titles, drawn, why):
            self._shown = side, titles, drawn, why
            self.refresh()

    def action_show_side(self, side: Side) -> None:
        """Ask for another side, after a click."""
        self.post_message(Picked(side=side))

    def words(self) -> list[Word]:
        """Return one word per side, and the legend."""
        asked_for, titles, drawn, why = self._shown
        names = dict(zip(SIDES, (*titles, "difference"), strict=True))
        sides = []
        for side, title in names.items():
            segment = Segment(f"[{title}]", CHOSEN) if side == asked_for else Segment(f" {title} ", DIM)
            sides.append(Word((segment,), f"show_side('{side}')", TOOLTIPS[title]))
        legends = LEGENDS[names[asked_for]] if drawn == asked_for else NOT_KNOWN[drawn]
        if why and drawn == asked_for and names[asked_for] == "difference":
            legends = (f"{WRONG} {why}",)
        room = self.size.width - sum(word.width for word in sides) - len(GAP)
        legend = next((text for text in legends if not self.size.width or len(text) <= room), "")
        return [*sides, Word((Segment(GAP + legend, DIM),))]


class MapPanel(Box):
    """A tensor's map below the choice of its sides, with a small mesh, and the element under the cursor in words."""

    _document: Document | None = None
    _selection = Selection()

    BINDINGS = keys(
        "panel",
        [
            ("x", "next_dims", "Next dims", "Draw the next two dims of a tensor with more than two"),
        ],
        hidden=[
            ("Y", "copy_block", "Copy range", "Copy the block under the cursor as a slice"),
            ("left_square_bracket", "step(-1)", "Previous slice", "The previous slice of the dims not drawn"),
            ("right_square_bracket", "step(1)", "Next slice", "The next slice of the dims not drawn"),
        ],
    )

    def compose(self) -> ComposeResult:
        """Put the sides above, the mesh beside the map, the words below."""
        yield SideBar(id="sides")
        yield TensorMap(id="map")
        yield MeshGrid(id="small-mesh")
        yield Inspector(id="inspector")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen tensor."""
        self._document, self._selection = document, selection
        entry, sides, why = document.entries[selection.entry], None, ""
        try:
            sides = document.sides(selection.entry, selection.name)
        except ShardvizError as error:
            why = error.message
        plane, shown = selection.plane, ""
        if plane is not None and len(plane.at) > 2:
            at = [
                "↓" if dim == plane.rows else "→" if dim == plane.cols else str(at) for dim, at in enumerate(plane.at)
            ]
            shown = f"  at [{', '.join(at)}]"
        layouts = f"  {entry.layout}{shown}", f"  {entry.short_layout}{shown}"
        self.set_name_title(entry.title_of(selection.name), after=layouts)
        side = drawn_side(sides, selection.side) if sides else selection.side
        titles, reasons = (sides.titles, "; ".join(sides.reasons)) if sides else (CLAIMED_AND_HELD, "")
        self.query_one(SideBar).show(selection.side, titles, side, reasons)
        tensor_map, claimed = self.query_one(TensorMap), entry.tensor.claimed
        pending = " ".join(f"+{axis}" for axis, _ in claimed.partial) if claimed else ""
        tensor_map.show(sides, side, plane, pending)
        tensor_map.describe = (lambda place: hovered(sides, place, entry.tensor.shape)) if sides else None
        self.query_one(Inspector).show(document, selection, sides, why)
        grid, mesh = self.query_one("#small-mesh", MeshGrid), claimed.mesh if claimed else document.mesh
        grid.show(mesh, selection.rank, lights_of(document, selection), sides.coloring if sides else None)
        grid.tooltip = LEGEND

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two."""
        plane = self._selection.plane
        if action in ("next_dims", "step"):
            return plane is not None and len(plane.at) > 2
        return plane is not None or action != "copy_block"

    def action_copy_block(self) -> None:
        """Copy the block under the cursor, as Python would slice it."""
        zoom = self.query_one(TensorMap).zoom
        if self._document is None or zoom is None:
            return
        tensor, block = self._document.entries[self._selection.entry].tensor, zoom.block()
        inside = block[len(block) - len(tensor.shape) :]
        text = f"{name_of(self._document, self._selection)}[{', '.join(f'{start}:{stop}' for start, stop in inside)}]"
        cast("ShardvizApp", self.app).copy(text)

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        if (plane := self._selection.plane) is not None:
            self._selection = replace(self._selection, plane=next_plane(plane))
            self.post_message(Picked(plane=self._selection.plane))

    def action_step(self, step: int) -> None:
        """Go to the next or the previous slice."""
        zoom, tensor_map = self.query_one(TensorMap).zoom, self.query_one(TensorMap)
        if zoom is not None and (place := next_slice(zoom.plane, zoom.sides.holders.shape, step)):
            tensor_map.go(place)
