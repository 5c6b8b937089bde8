"""The findings: one line each, and the chosen one in full."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on

from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

from ..colors import verdict_style
from ..model.names import shortened
from ..model.selection import of_finding
from ..widgets.box import Box
from ..widgets.finding_card import BESIDE, MOST_COLUMNS, CardBox, FindingCard, Room, finding_head
from ..widgets.grid import Lines
from .view import View

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ..model.document import Document
    from ..model.selection import Selection


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
            yield FindingLines(id="finding-lines")
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


class FindingLines(Lines):
    """The list of findings."""

    HELP = FindingsView.HELP


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
