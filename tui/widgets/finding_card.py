"""One finding in full: its sentence, claimed / held / intended under each other, its cause and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import Static

from shardviz.names import printable

from ..colours import GREEN, verdict_style
from ..document import GLYPHS

if TYPE_CHECKING:
    from shardviz.check.finding import Finding

    from ..document import Document

MARGIN = 10


class FindingCard(Static):
    """The card; without findings it says how the check ended."""

    def show(self, document: Document | None, finding: int) -> None:
        """Show one finding of a document."""
        self.update(finding_text(document, finding))


def finding_text(document: Document | None, index: int) -> Text:
    """Write a finding, or what there is to say without one."""
    if document is None:
        return Text("reading …", "dim")
    if not document.findings:
        return _verdict_text(document)
    finding = document.findings[index]
    verdict = finding.severity
    name = printable(finding.tensor)
    text = Text.assemble(
        (f"{GLYPHS[verdict]} {finding.kind}", verdict_style(verdict)),
        (f"  {name[:80]}" if name else "", "bold"),
        (f"   finding {index + 1} of {len(document.findings)}", "dim"),
        f"\n{printable(finding.summary)}",
    )
    for label, value in _lines(finding):
        text.append(f"\n{label:<{MARGIN}}", "bold" if label == "fix" else "dim")
        text.append(printable(value), f"bold {GREEN}" if label == "fix" else "")
    return text


def _lines(finding: Finding) -> list[tuple[str, str]]:
    lines = [
        ("claimed", finding.claimed),
        ("held", finding.held),
        ("intended", finding.intended),
        ("fix", finding.fix),
        ("cause", finding.cause),
        ("see", ", ".join(finding.refs)),
    ]
    return [(label, value) for label, value in lines if value]


def _verdict_text(document: Document) -> Text:
    if document.failed:
        return Text.assemble(("? not checked: ", verdict_style("unchecked")), printable(document.failed))
    if document.report is None:
        return Text("… checking", "dim")
    count = document.report.num_tensors
    text = Text.assemble(
        ("✓ no findings", verdict_style("clean")),
        f": all {count} tensors are where their placements say" if count > 1 else ": the tensor is where it should be",
    )
    for skipped in document.report.not_checked:
        text.append(f"\n? not checked  {printable(skipped.tensor)}: {printable(skipped.why)}", "dim")
    return text
