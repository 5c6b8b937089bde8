"""The first view: the tensors, the map with its sides, the finding; and all findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual import on
from textual.containers import Horizontal

from shardviz.errors import ShardvizError
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import CLAIMED_AND_HELD
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

from ..colors import verdict_style
from ..keys import keys
from ..model.names import fitted
from ..model.selection import Picked, Selection, TensorOpened, next_plane, next_slice, of_finding
from ..model.stored import StoredDocument, file_line
from ..model.tree import after
from ..widgets.finding_card import BESIDE, CardBox, FindingCard, finding_head, lines_to_fix
from ..widgets.frame import Box, WordLine, word
from ..widgets.grid import CHOSEN, DIM, Lines
from ..widgets.listing import SEARCHING, TO_TREE, Listing, Searching, TensorTree
from ..widgets.mesh_grid import LEGEND, MeshGrid, drawn_side, lights_of
from ..widgets.tensor_map import Inspector, TensorMap
from .view import SIDES, View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from shardviz.checkpoint.records import Checkpoint
    from shardviz.picture.text.paint import Side

    from ..model.selection import AnyDocument, Target
    from ..viewer import Viewer


GAP = "  "
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
        """Mark a side of two titles, and show the legend of what is drawn instead, or why the sides differ."""
        self._shown = side, titles, drawn, why
        self.on_resize()

    def action_show_side(self, side: Side) -> None:
        """Ask for another side, after a click."""
        self.post_message(Picked(side=side))

    def on_resize(self) -> None:
        """Write one word per side, and the legend that there is room for."""
        asked_for, titles, drawn, why = self._shown
        names = dict(zip(SIDES, (*titles, "difference"), strict=True))
        line = Text()
        for side, title in names.items():
            text, style = (f"[{title}]", CHOSEN) if side == asked_for else (f" {title} ", DIM)
            line.append_text(word(text, f"show_side('{side}')", TOOLTIPS[title], style))
        legends = LEGENDS[names[asked_for]] if drawn == asked_for else NOT_KNOWN[drawn]
        if why and drawn == asked_for and names[asked_for] == "difference":
            legends = (f"{WRONG} {why}",)
        room = self.size.width - line.cell_len - len(GAP)
        legend = next((text for text in legends if not self.size.width or len(text) <= room), "")
        self.update(line.append(GAP + legend, DIM), layout=False)


class MapPanel(Box):
    """A tensor's map below the choice of its sides, with a small mesh, and the element under the cursor in words."""

    BINDINGS = keys(
        "panel",
        [("x", "next_dims", "Next dims", "Draw the next two dims of a tensor with more than two")],
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

    def show(self, document: AnyDocument, selection: Selection) -> None:
        """Show the chosen tensor."""
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
        self.set_titles(f"{fitted(entry.title_of(selection.name))}  {entry.layout}{shown}")
        side = drawn_side(sides, selection.side) if sides else selection.side
        titles, reasons = (sides.titles, "; ".join(sides.reasons)) if sides else (CLAIMED_AND_HELD, "")
        tensor_map = self.query_one(TensorMap)
        tensor_map.show(sides, side, plane, entry.pending)
        tensor_map.describe = lambda place: document.describe(selection.entry, place, selection.name)
        self.query_one(Inspector).show(document, selection, sides, why)
        bar, grid = self.query_one(SideBar), self.query_one("#small-mesh", MeshGrid)
        if isinstance(document, StoredDocument):
            bar.display = grid.display = False
            return
        bar.show(selection.side, titles, side, reasons)
        mesh, coloring = entry.mesh or document.mesh, sides.coloring if sides else None
        grid.show(mesh, selection.rank, lights_of(document, selection), coloring)
        grid.tooltip = LEGEND

    @property
    def _state(self) -> Viewer[AnyDocument]:
        return cast("Viewer[AnyDocument]", self.app)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims are chosen if there are more than two."""
        plane = self._state.selection.plane
        if action in ("next_dims", "step"):
            return plane is not None and len(plane.at) > 2
        return plane is not None or action != "copy_block"

    def action_copy_block(self) -> None:
        """Copy the block under the cursor, as Python would slice it."""
        document, zoom = self._state.document, self.query_one(TensorMap).zoom
        if document is not None and zoom is not None:
            ndim = len(document.entries[self._state.selection.entry].tensor.shape)
            inside = ", ".join(f"{start}:{stop}" for start, stop in zoom.block()[-ndim:] if ndim)
            self._state.copy(f"{self._state.chosen_name}[{inside}]")

    def action_next_dims(self) -> None:
        """Draw the next two dims."""
        if (plane := self._state.selection.plane) is not None:
            self.post_message(Picked(plane=next_plane(plane)))

    def action_step(self, step: int) -> None:
        """Go to the next or the previous slice."""
        zoom, tensor_map = self.query_one(TensorMap).zoom, self.query_one(TensorMap)
        if zoom is not None and (place := next_slice(zoom.plane, zoom.sides.holders.shape, step)):
            tensor_map.go(place)


MAP, SMALL_MAP = 15, 8
"""Lines of a map's box beside the finding that it shows, and beside one that a table shows."""

MOST = 0.6
"""The part of the lines that a finding gets at most: the list of tensors needs the others."""


class ExploreView(View["AnyDocument"], Searching):
    """A tree of tensors, the map of the chosen one, and its finding."""

    NAME = "explore"
    TITLE = "Tensors"
    TOOLTIP = "The tensors and their maps"
    FOCUS = "#tree"

    BINDINGS = keys(
        "explore",
        [("v", "next_side", "Claimed/held", "Show claimed, held, or their difference"), *SEARCHING],
        hidden=[
            ("r", "next('role')", "Next role", "Show all tensors, also the step's, or those of one role"),
            ("a", "next('axis')", "Next axis", "Show only tensors split over the next mesh axis"),
            TO_TREE,
        ],
    )

    def compose(self) -> ComposeResult:
        """Put the tree on the left, the map on the right, the finding below both."""
        yield Listing(TensorTree(id="tree"), id="tree-box")
        yield MapPanel(id="map-panel")
        with CardBox(id="finding"):
            yield FindingCard("reading …", id="card")

    def show(self, document: AnyDocument, selection: Selection) -> None:
        """Show the chosen tensor and finding."""
        self.query_one(Listing).show(document.entries, selection.entry, selection.name)
        self._show_finding(document, selection)
        if document.entries:
            self.query_one(MapPanel).show(document, selection)

    def on_resize(self) -> None:
        """Write the finding in the columns that there are now."""
        if self.display and self.state.document is not None:
            self._show_finding(self.state.document, self.state.selection)

    def _show_finding(self, document: AnyDocument, selection: Selection) -> None:
        """Show the finding of the chosen tensor."""
        box, card, finding = self.query_one(CardBox), self.query_one(FindingCard), selection.finding
        if document.findings and not document.is_about(finding, selection.entry):
            card.show_other(document, selection.entry, finding, self.state.numbers["findings"])
            box.head(Text())
            return
        card.show(document, finding, self.room.width)
        if document.findings:
            height, has_table = self.room.height, document.exhibit(finding) is not None
            most = min(height - (SMALL_MAP if has_table else MAP), int(height * MOST))
            least = lines_to_fix(document.findings[finding], self.room.width - BESIDE)
            box.styles.max_height = max(most, least + (1 if self.screen.has_class("-short") else 2))
        box.head(finding_head(document, finding), f"{self.state.numbers['findings']} shows all")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A checkpoint has one side, no roles and no axes."""
        return action not in ("next_side", "next") or not isinstance(self.state.document, StoredDocument)

    @on(TensorOpened)
    def focus_map(self) -> None:
        """Let the keys move the map's cursor."""
        self.query_one("#map").focus()

    def show_target(self, target: Target) -> None:
        """Let the layer that a target is in stand on its own in the tree, and go to its element on the map."""
        self.query_one(Listing).set_apart(target.name)
        if target.place is not None:
            self.focus_map()

    def action_next(self, name: str) -> None:
        """List only tensors of the next role, or over the next axis: first all, then each alone."""
        if self.state.document is not None:
            entries, listing = self.state.document.entries, self.query_one(Listing)
            roles, axes = {entry.role for entry in entries}, {axis for entry in entries for axis in entry.axes}
            choices = ["", "all", *sorted(roles)] if name == "role" else ["", *sorted(axes)]
            listing.filter(**{name: after(choices, getattr(listing.filters, name))})


class StoredView(ExploreView):
    """The same of a checkpoint, with its files beside the finding."""

    HELP = """\
## The checkpoint

Its tensors on the left; the map of the chosen one shows which part of it is in which file. The files are numbered, and
listed below with their sizes, each beside the largest one's. Beside them is what is wrong.
"""

    _checkpoint: Checkpoint | None = None

    def compose(self) -> ComposeResult:
        """Put the files and the finding below the tree and the map."""
        yield Listing(TensorTree(id="tree"), id="tree-box")
        yield MapPanel(id="map-panel")
        with Horizontal(id="stored-below"):
            with Box(id="files-box"):
                yield Lines(id="files")
            with CardBox(id="finding"):
                yield FindingCard("reading …", id="card")

    def show(self, document: AnyDocument, selection: Selection) -> None:
        """Show the chosen tensor, its finding, and the files once they are read."""
        super().show(document, selection)
        assert isinstance(document, StoredDocument), "it shows nothing else"
        if document.checkpoint is not self._checkpoint:
            self._checkpoint = document.checkpoint
            names, sizes, lines = [*document.numbers], document.checkpoint.file_sizes, self.query_one("#files", Lines)
            most = max((size or 0 for size in sizes.values()), default=0)
            lines.show(
                len(names), lambda at: file_line(at, names[at], sizes[names[at]], most, lines.palette, lines.text_width)
            )
            self.query_one("#files-box", Box).set_titles(f"Files: {len(names):,}")


class FindingsView(View["AnyDocument"]):
    """A list of all findings, with the one under the cursor in full."""

    NAME = "findings"
    TITLE = "Findings"
    TOOLTIP = "All findings"
    FOCUS = "#finding-lines"

    HELP = """\
## The findings

One line per finding, errors first; one that many tensors have is one line. The chosen one is below in full. To open
one is to go to its place on the map.
"""

    def compose(self) -> ComposeResult:
        """Put the lines above, the whole finding below."""
        with Box(id="findings-box") as box:
            box.set_titles("Findings")
            yield Lines(id="finding-lines")
        with CardBox(id="full"):
            yield FindingCard("reading …", id="full-card")

    def show(self, document: AnyDocument, selection: Selection) -> None:
        """Show the findings, with the cursor on the chosen one."""
        self.query_one(FindingCard).show(document, selection.finding, self.room.width)
        self.query_one(CardBox).head(finding_head(document, selection.finding))
        count = len(document.findings)
        self.query_one("#findings-box").display = count > 0
        self.query_one(Lines).show(count, lambda index: _line(document, index), selection.finding)

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        self.state.selection = replace(self.state.selection, finding=message.index)

    @on(Lines.Chosen)
    def _chosen(self, message: Lines.Chosen) -> None:
        if self.state.document is not None:
            self.state.selection = of_finding(self.state.document, self.state.selection, message.index)
            self.state.action_show_view("explore")


def _line(document: AnyDocument, index: int) -> Text:
    finding = document.findings[index]
    name = fitted(printable(finding.title)) or "(the dump)"
    return Text.assemble(
        (f" {UNICODE.of(finding.severity)} ", verdict_style(finding.severity)),
        (f"{name:<28}", "bold"),
        f"  {finding.kind:<20} ",
        (printable(finding.summary), "dim"),
        no_wrap=True,
    )
