"""The map with all that belongs to it: the sides above, the mesh beside it where there is room, the element below."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on

from shardviz.errors import ShardvizError
from shardviz.text import printable

from ..clipboard import copy
from ..keys import keys
from ..model.lights import lights_of
from ..model.messages import SideChosen
from ..model.names import shortened
from ..model.selection import next_plane
from ..screens.goto import GotoScreen
from .box import Box, Column, Row
from .inspector import Inspector
from .mesh_grid import LEGEND, MeshGrid
from .side_bar import SideBar
from .tensor_map import TensorMap

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.picture.model.sides import Sides

    from ..app import ShardvizApp
    from ..model.document import Document, Entry
    from ..model.selection import Selection


class MapPanel(Box):
    """A tensor's map under the choice of its sides, with a small mesh, and its element in words."""

    app: ShardvizApp
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys(
            "panel",
            [
                ("g", "goto", "Go to", "Go to an index, or to an id"),
                ("y", "copy_block", "Copy range", "Copy the block under the cursor as a slice"),
                ("x", "next_dims", "Dims", "Draw the next two dims of a tensor with more than two"),
            ],
            show=True,
        ),
        *keys(
            "panel",
            [
                ("left_square_bracket", "step(-1)", "Slice before", "The slice before, of the dims that are not drawn"),
                ("right_square_bracket", "step(1)", "Next slice", "The next slice of the dims that are not drawn"),
            ],
        ),
    ]

    def compose(self) -> ComposeResult:
        """Put the sides above, the mesh beside the map, the words below."""
        yield SideBar(id="sides")
        with Row():
            yield TensorMap(id="map")
            with Column(id="panel-mesh"):
                yield MeshGrid(id="small-mesh")
        yield Inspector(id="inspector")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen tensor."""
        entry = document.entries[selection.entry]
        sides, why = _sides(document, selection.entry)
        self.entitle(_title(entry, selection))
        self.query_one(SideBar).show(selection.side)
        self.query_one(TensorMap).show(sides, selection.side, selection.plane, pending_text(entry))
        self.query_one(Inspector).show(document, selection, sides, why)
        mesh = entry.tensor.claimed.mesh if entry.tensor.claimed else document.dump.files.mesh
        grid = self.query_one("#small-mesh", MeshGrid)
        grid.show(mesh, selection.rank, lights_of(document, selection))
        grid.tooltip = LEGEND

    def focus_map(self) -> None:
        """Walk on the map."""
        self.query_one(TensorMap).focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen where there are more than two."""
        plane = self.app.selection.plane
        if action in ("next_dims", "step"):
            return plane is not None and len(plane.at) > 2
        return plane is not None or action not in ("goto", "copy_block")

    @on(SideChosen)
    def _side_chosen(self, message: SideChosen) -> None:
        self.app.selection = replace(self.app.selection, side=message.side)

    def action_goto(self) -> None:
        """Ask for an element and go there."""
        document, selection = self.app.document, self.app.selection
        if document is None or selection.plane is None:
            return
        shape = document.entries[selection.entry].tensor.shape
        before = (0,) * (len(selection.plane.at) - len(shape))

        def go(place: tuple[int, ...] | None) -> None:
            if place is not None:
                self.focus_map()
                self.query_one(TensorMap).go((*before, *place))

        self.app.push_screen(GotoScreen(shape), go)

    def action_copy_block(self) -> None:
        """Copy the block under the cursor, as Python would slice it."""
        document, selection = self.app.document, self.app.selection
        block = self.query_one(TensorMap).block()
        if document is None or block is None:
            return
        tensor = document.entries[selection.entry].tensor
        inside = block[len(block) - len(tensor.shape) :]
        text = f"{tensor.names[0]}[{', '.join(f'{start}:{stop}' for start, stop in inside)}]"
        copy(self.app, text)
        self.notify(printable(text), title="Copied", markup=False)

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        selection = self.app.selection
        if selection.plane is not None:
            self.app.selection = replace(selection, plane=next_plane(selection.plane))

    def action_step(self, step: int) -> None:
        """Step through the slices of the dims that are not drawn, the last dim fastest."""
        sides, _ = _sides(self.app.document, self.app.selection.entry) if self.app.document else (None, "")
        plane = self.app.selection.plane
        if sides is None or plane is None:
            return
        place, left = list(plane.at), step
        for dim in reversed([dim for dim in range(len(place)) if dim not in (plane.rows, plane.cols)]):
            left, place[dim] = divmod(place[dim] + left, sides.holders.shape[dim])
        if not left:
            self.query_one(TensorMap).go(tuple(place))


def pending_text(entry: Entry) -> str:
    """Return what a label says of pending sums."""
    claimed = entry.tensor.claimed
    return " ".join(f"+{axis}" for axis, _ in claimed.partial) if claimed else ""


def _sides(document: Document, entry: int) -> tuple[Sides | None, str]:
    """Return what can be drawn of an entry, or why nothing can."""
    try:
        return document.sides(entry), ""
    except ShardvizError as error:
        return None, error.message


def _title(entry: Entry, selection: Selection) -> str:
    title = f"{shortened(entry.title)}  {entry.layout}"
    plane = selection.plane
    if plane is not None and len(plane.at) > 2:
        at = ["↓" if dim == plane.rows else "→" if dim == plane.cols else str(at) for dim, at in enumerate(plane.at)]
        title += f"  at [{', '.join(at)}]"
    return title
