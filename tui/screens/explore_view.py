"""The first view, of the tensors, the map of the chosen one and its finding; and the view of all findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on

from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

from ..colors import verdict_style
from ..keys import keys
from ..model.names import shortened
from ..model.selection import TensorOpened, of_finding
from ..model.tree import after
from ..widgets.finding_card import (
    BESIDE,
    BESIDE_SHORT,
    MOST_COLUMNS,
    CardBox,
    FindingCard,
    Room,
    finding_head,
    lines_to_fix,
    most_of_card,
)
from ..widgets.frame import Box
from ..widgets.grid import Lines
from ..widgets.listing import SEARCHING, TO_TREE, Listing, Searching
from ..widgets.map_panel import MapPanel
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..model.document import Document
    from ..model.selection import Selection, Target


EDGE = 1
"""Lines of a border above or below a card."""

FINDINGS_KEY = "4"
"""The key of the screen with all findings."""


class ExploreView(View, Searching):
    """A tree of tensors, the map of the chosen one, and its finding."""

    NAME = "explore"
    TITLE = "Tensors"
    TOOLTIP = "The tensors and their maps"
    FOCUS = "#tree"

    _listed: tuple[Document | None, int] = (None, 0)
    """A document, and how many tensors of it are listed."""

    BINDINGS = keys(
        "explore",
        [
            ("v", "next_side", "Claimed/held", "Show claimed, held, or their difference"),
            *SEARCHING,
        ],
        hidden=[
            ("r", "next('role')", "Next role", "Show all tensors, also the step's, or those of one role"),
            ("a", "next('axis')", "Next axis", "Show only tensors split over the next mesh axis"),
            TO_TREE,
        ],
    )

    def compose(self) -> ComposeResult:
        """Put the tree on the left, the map on the right, the finding below both."""
        yield Listing(id="tree-box")
        yield MapPanel(id="map-panel")
        with CardBox(id="finding"):
            yield FindingCard(id="card")

    def show(self, document: Document, selection: Selection) -> None:
        """Show the chosen tensor and finding."""
        self.query_one(Listing).show(document.entries, selection.entry, selection.name)
        self._show_finding(document, selection)
        if document.entries:
            self.query_one(MapPanel).show(document, selection)

    def on_resize(self) -> None:
        """Share the lines again."""
        if self.display and self.state.document is not None:
            self._show_finding(self.state.document, self.state.selection)

    def _show_finding(self, document: Document, selection: Selection) -> None:
        """Show the finding of the chosen tensor in the lines that map and list can do without."""
        box, card, finding = self.query_one(CardBox), self.query_one(FindingCard), selection.finding
        if document.findings and not document.is_about(finding, selection.entry):
            card.show_other(document, selection.entry, finding)
            box.head(Text())
            return
        room = self._room(document, finding)
        box.styles.max_height = room.height + (EDGE if self.screen.has_class("-short") else 2 * EDGE)
        card.show(document, finding, room)
        box.head(finding_head(document, finding), f"{FINDINGS_KEY} shows all")

    def _room(self, document: Document, finding: int) -> Room:
        """Return the lines and columns of the finding's card."""
        width, height = self.room
        is_short = self.screen.has_class("-short")
        borders = EDGE if is_short else 2 * EDGE
        listed = sum(len(entry.names) for entry in document.entries if entry.listed)
        has_table = finding < len(document.findings) and document.exhibit(finding) is not None
        columns = max(width - (BESIDE_SHORT if is_short else BESIDE), 1)
        least = lines_to_fix(document.findings[finding], columns) if document.findings else 0
        lines = most_of_card(height, listed, borders=borders, has_table=has_table, least=least) - borders
        return Room(columns, max(lines, 1))

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


class FindingsView(View):
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
            yield FindingCard(id="full-card")

    def chosen(self, selection: Selection) -> object:
        """Return the chosen finding."""
        return selection.finding

    def show(self, document: Document, selection: Selection) -> None:
        """Show the findings, with the cursor on the chosen one."""
        self.query_one(FindingCard).show(document, selection.finding, Room(max(self.room.width - BESIDE, MOST_COLUMNS)))
        self.query_one(CardBox).head(finding_head(document, selection.finding), "tab, down")
        count = len(document.findings)
        self.query_one("#findings-box").display = count > 0
        self.query_one(Lines).show(count, lambda index: _line(document, index), selection.finding)

    @on(Lines.Highlighted)
    def _highlighted(self, message: Lines.Highlighted) -> None:
        self.state.selection = replace(self.state.selection, finding=message.index)

    @on(Lines.Chosen)
    async def _chosen(self, message: Lines.Chosen) -> None:
        if self.state.document is not None:
            self.state.selection = of_finding(self.state.document, self.state.selection, message.index)
            await self.state.action_show_view("explore")


def _line(document: Document, index: int) -> Text:
    finding = document.findings[index]
    name = shortened(printable(finding.title)) or "(the dump)"
    return Text.assemble(
        (f" {UNICODE.of(finding.severity)} ", verdict_style(finding.severity)),
        (f"{name:<28}", "bold"),
        f"  {finding.kind:<20} ",
        (printable(finding.summary), "dim"),
        no_wrap=True,
    )
