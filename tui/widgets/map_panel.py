"""The map with its parts: the sides above, the mesh beside it if there is room, the element below."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, get_args

from rich.segment import Segment
from textual.containers import Horizontal, Vertical

from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.picture.text.paint import Side
from shardviz.text import printable

from ..export import copy
from ..keys import keys
from ..model.mesh_plan import drawn_side, lights_of
from ..model.messages import PlaneTurned, SideChosen
from ..model.selection import Selection, name_of, next_slice
from .box import Box
from .grid import DIM
from .inspector import Inspector, hovered
from .mesh_grid import LEGEND, MeshGrid
from .tensor_map import TensorMap
from .words import CHOSEN, Word, WordLine

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.picture.model.sides import Sides

    from ..model.document import Document, TensorEntry


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


class MapPanel(Box):
    """A tensor's map below the choice of its sides, with a small mesh, and the element under the cursor in words."""

    _document: Document | None = None
    _selection = Selection()

    BINDINGS: ClassVar[list[BindingType]] = [
        *keys(
            "panel",
            [
                ("x", "next_dims", "Next dims", "Draw the next two dims of a tensor with more than two"),
            ],
            show=True,
        ),
        *keys(
            "panel",
            [
                ("Y", "copy_block", "Copy range", "Copy the block under the cursor as a slice"),
                ("left_square_bracket", "step(-1)", "Previous slice", "The previous slice of the dims not drawn"),
                ("right_square_bracket", "step(1)", "Next slice", "The next slice of the dims not drawn"),
            ],
        ),
    ]

    def compose(self) -> ComposeResult:
        """Put the sides above, the mesh beside the map, the words below."""
        yield SideBar(id="sides")
        with Horizontal():
            yield TensorMap(id="map")
            with Vertical(id="panel-mesh"):
                yield MeshGrid(id="small-mesh")
        yield Inspector(id="inspector")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen tensor."""
        self._document, self._selection = document, selection
        entry = document.entries[selection.entry]
        sides, why = _sides(document, selection)
        self.set_name_title(entry.title_of(selection.name), after=_layouts(entry, selection))
        side = drawn_side(sides, selection.side) if sides else selection.side
        titles = sides.titles if sides else CLAIMED_AND_HELD
        self.query_one(SideBar).show(selection.side, titles, side, "; ".join(sides.reasons) if sides else "")
        self.query_one(TensorMap).show(sides, side, selection.plane, _pending_text(entry))
        shape = entry.tensor.shape
        self.query_one(TensorMap).describe = (lambda place: hovered(sides, place, shape)) if sides else None
        self.query_one(Inspector).show(document, selection, sides, why)
        mesh = entry.tensor.claimed.mesh if entry.tensor.claimed else document.dump.files.mesh
        grid = self.query_one("#small-mesh", MeshGrid)
        grid.show(mesh, selection.rank, lights_of(document, selection), sides.colouring if sides else None)
        grid.tooltip = LEGEND

    def focus_map(self) -> None:
        """Let the keys move the map's cursor."""
        self.query_one(TensorMap).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two."""
        plane = self._selection.plane
        if action in ("next_dims", "step"):
            return plane is not None and len(plane.at) > 2
        return plane is not None or action != "copy_block"

    def action_copy_block(self) -> None:
        """Copy the block under the cursor, as Python would slice it."""
        block = self.query_one(TensorMap).block()
        if self._document is None or block is None:
            return
        tensor = self._document.entries[self._selection.entry].tensor
        inside = block[len(block) - len(tensor.shape) :]
        text = f"{name_of(self._document, self._selection)}[{', '.join(f'{start}:{stop}' for start, stop in inside)}]"
        copy(self.app, text)
        self.notify(printable(text), title="Copied", markup=False)

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        self.post_message(PlaneTurned())

    def action_step(self, step: int) -> None:
        """Go to the next or the previous slice."""
        plane = self._selection.plane
        sides, _ = _sides(self._document, self._selection) if self._document else (None, "")
        if sides is not None and plane is not None and (place := next_slice(plane, sides.holders.shape, step)):
            self.query_one(TensorMap).go(place)


def _pending_text(entry: TensorEntry) -> str:
    """Return the axes over which a tensor's placements claim a pending sum."""
    claimed = entry.tensor.claimed
    return " ".join(f"+{axis}" for axis, _ in claimed.partial) if claimed else ""


def _sides(document: Document, selection: Selection) -> tuple[Sides | None, str]:
    """Return both sides of the chosen tensor, or why they cannot be drawn."""
    try:
        return document.sides(selection.entry, selection.name), ""
    except ShardvizError as error:
        return None, error.message


def _layouts(entry: TensorEntry, selection: Selection) -> tuple[str, str]:
    """Return what stands behind the name in the title, with the element type and without."""
    plane, shown = selection.plane, ""
    if plane is not None and len(plane.at) > 2:
        at = ["↓" if dim == plane.rows else "→" if dim == plane.cols else str(at) for dim, at in enumerate(plane.at)]
        shown = f"  at [{', '.join(at)}]"
    return f"  {entry.layout}{shown}", f"  {entry.short_layout}{shown}"
