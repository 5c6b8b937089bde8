"""One finding in full: its sentence, claimed / held / intended under each other, its cause and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from shardviz.check.verdicts import not_compared
from shardviz.picture.model.palette import GREEN
from shardviz.picture.text.report import uncompared_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import printable

from ..colours import ink, verdict_style
from ..model.names import shortened

if TYPE_CHECKING:
    from shardviz.check.finding import Finding

    from ..model.document import Document

MOST_NAME = 40


class FindingCard(Static):
    """A finding's sentence, layouts, fix and cause; without findings, the result of the check."""

    _shown: tuple[Document | None, int] | None = None

    def show(self, document: Document | None, finding: int) -> None:
        """Show one finding of a document."""
        if self._shown is not None and self._shown[0] is document and self._shown[1] == finding:
            return
        self._shown = (document, finding)
        if document is None or not document.findings:
            self.update(verdict_text(document) if document else Text("reading …", "dim"))
        else:
            self.update(finding_body(document.findings[finding]))


def finding_head(document: Document | None, index: int) -> Text:
    """Write the kind of a finding, its tensor, and how many findings there are."""
    if document is None or not document.findings:
        return Text()
    finding = document.findings[index]
    name = shortened(printable(finding.title), MOST_NAME)
    kind = f"{UNICODE.of(finding.severity)} {finding.kind}"
    return Text.assemble(
        (kind, "bold"), f" {name} " if name else " ", (f"· finding {index + 1} of {len(document.findings)}", "dim")
    )


def finding_body(finding: Finding) -> Group:
    """Write a finding: what is wrong, then its rows under each other."""
    details = [("more", "; ".join(finding.details))] if finding.details else []
    table = Table.grid(padding=(0, 2, 0, 0))
    # The fix before the cause: on a small terminal nothing below it is in view.
    advice = sorted(finding.advice, key=lambda row: row[0] != "fix")
    for label, value in (*finding.layouts, *advice, *details):
        style = ink(GREEN, bold=True) if label == "fix" else ""
        table.add_row(Text(label, "bold" if label == "fix" else "dim"), Text(printable(value), style))
    return Group(Text(printable(finding.sentence)), table)


def verdict_text(document: Document) -> Text:
    """Write the result of a check without findings, and what was not checked: identical layers once."""
    if document.failed:
        return Text.assemble(("? not checked: ", verdict_style("unknown")), printable(document.failed))
    if document.report is None:
        return Text("… checking", "dim")
    count = document.report.num_tensors
    text = Text.assemble(
        ("✓ no findings", verdict_style("good")),
        f": all {count} tensors match their placements" if count > 1 else ": the tensor matches its placements",
        (uncompared_text(not_compared(document.dump)), "dim"),
    )
    for names, why in document.report.folded_not_checked:
        name = f"{printable(str(names))}: " if str(names) else ""
        text.append(f"\n? not checked: {name}{printable(why)}", "dim")
    return text
