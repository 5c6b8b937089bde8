"""The mesh: all ranks by their coordinates, the chosen one's card, and its part of the chosen tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical
from textual.widgets import Static

from shardviz.picture.model.holders import ranks_in_words
from shardviz.text import bytes_text, counted, printable

from ..colors import verdict_style
from ..keys import keys
from ..model.mesh_plan import drawn_side, lights_of
from ..model.selection import rank_of
from ..widgets.box import Box, ScrollBox
from ..widgets.mesh_grid import LEGEND, MeshGrid
from ..widgets.tensor_map import TensorMap
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from shardviz.picture.text.paint import Side

    from ..app import ShardvizApp
    from ..model.document import Document
    from ..model.selection import Selection


class RankCard(Static):
    """A rank's host, the bytes that it holds, and for each axis its position and its group."""

    def show(self, document: Document, rank: int) -> None:
        """Show a rank."""
        text = rank_text(document, rank)
        if text != self.content:
            self.update(text)


def rank_text(document: Document, rank: int) -> Text:
    """Write the lines of a rank."""
    files = document.dump.files
    mesh = files.mesh
    text = Text.assemble((f"rank {rank}", "bold"), f" of {files.run.num_ranks:,}")
    if rank in files.ranks:
        held = [item for item in document.counted if rank in item.tensor.shards]
        count, taken = sum(len(item.widths) for item in held), sum(item.on(rank) for item in held)
        host = printable(files.ranks[rank].hostname)
        text.append(f" on {host}" if host else "")
        text.append(f"\nholds {bytes_text(taken)} in {counted(count, 'tensor')}")
    elif document.is_partial:
        text.append("\n… not read yet", "dim")
    else:
        text.append("\n? the dump has no readable file for this rank", verdict_style("warning"))
    if rank in mesh:
        width = max(map(len, mesh.axes))
        for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True):
            group = ranks_in_words(mesh.group_of(rank, axis))
            text.append(f"\n{axis:<{width}} ", "dim").append(f"{position} among {group}")
    return text


class MeshView(View):
    """Every rank in a grid of axes; the groups of the chosen one and its part of the chosen tensor."""

    NAME = "mesh"
    TITLE = "Mesh"
    TOOLTIP = "All ranks by their coordinates"
    FOCUS = "#mesh-grid"

    BINDINGS: ClassVar[list[BindingType]] = keys(
        "mesh",
        [
            ("a", "next_axis", "Next group", "Underline the group along the next axis"),
            ("b", "next_heat", "Next heat", "Color ranks by bytes, by findings, by bytes received, or by their place"),
            ("enter", "open_rank", "Open rank", "Show everything that this rank holds"),
        ],
    )

    def __init__(self, state: ShardvizApp) -> None:
        super().__init__(state)
        self._axis = -1
        self._heat = 0

    def compose(self) -> ComposeResult:
        """Put the grid on the left, the rank's card over its map on the right."""
        with Box(id="mesh-box"):
            yield MeshGrid(id="mesh-grid")
            yield Static(LEGEND, classes="legend", markup=False)
        with Vertical(id="mesh-side"):
            with ScrollBox(classes="boxed short", can_focus=False):
                yield RankCard(id="rank-card")
            with Box(id="mesh-map-box"):
                yield TensorMap(id="mesh-map")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen rank, and the ranks that hold the element under the map's cursor."""
        mesh, rank = document.mesh, rank_of(document, selection)
        axis = mesh.axes[self._axis] if 0 <= self._axis < mesh.ndim else ""
        heat = document.heats[self._heat - 1] if 0 < self._heat <= len(document.heats) else None
        lights, coloring = lights_of(document, selection, rank, axis), document.coloring_of(selection.entry)
        self.query_one(MeshGrid).show(mesh, rank, lights, coloring, heat)
        below = f"underlined: the group along {axis}" if axis else ""
        self.query_one("#mesh-box", Box).set_titles(f"mesh {mesh}", str(heat) if heat else below)
        self.query_one(RankCard).show(document, rank)
        if document.entries:
            self._show_map(document, selection, rank)

    def _show_map(self, document: Document, selection: Selection, rank: int) -> None:
        side: Side = "held" if selection.side == "difference" else selection.side
        sides = document.drawn(selection.entry, selection.name)
        shown_side = drawn_side(sides, side) if sides is not None else side
        self.query_one(TensorMap).show(sides, shown_side, selection.plane, lit=rank)
        name = document.entries[selection.entry].title_of(selection.name)
        self.query_one("#mesh-map-box", Box).set_name_title(name, before=f"rank {rank}'s part of ")

    def action_next_axis(self) -> None:
        """Underline the group along the next axis, or none."""
        if self.state.document is not None:
            self._axis = (self._axis + 2) % (self.state.document.mesh.ndim + 1) - 1
            self.show_again()

    def action_next_heat(self) -> None:
        """Color ranks by the next number, or by their place again."""
        if self.state.document is not None:
            self._heat = (self._heat + 1) % (len(self.state.document.heats) + 1)
            self.show_again()

    async def action_open_rank(self) -> None:
        """Show the rank's own view."""
        await self.state.action_show_view("rank")
