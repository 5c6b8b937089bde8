"""One finding in full: its sentence, layouts, cause and fix, in the lines that the map and the list leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Span, Text
from textual.widgets import Static

from shardviz.check.verdicts import not_compared
from shardviz.picture.model.palette import GREEN, VERMILLION
from shardviz.picture.text.ranks import exhibit_lines
from shardviz.picture.text.report import uncompared_text
from shardviz.picture.text.terminal import BAD, GOOD, UNICODE, Terminal
from shardviz.text import counted, printable

from ..colors import ink, verdict_style
from ..model.document import Document
from ..model.names import fitted
from .frame import ScrollBox, verdict_text

if TYPE_CHECKING:
    from shardviz.explain.finding import Finding
    from shardviz.picture.exhibits.exhibit import Exhibit

    from ..model.selection import AnyDocument


GAP = 2
"""Columns between the labels of rows and what is behind them."""
COLUMNS = 74
"""Columns of a card on the smallest terminal."""


class FindingCard(Static):
    """A finding's sentence, layouts, fix and cause; without findings, the result of the check."""

    _shown: tuple[AnyDocument, int, int] | None = None

    def show(self, document: AnyDocument, finding: int, width: int) -> None:
        """Show one finding of a document, in so many columns."""
        if self._shown is not None and self._shown[0] is document and self._shown[1:] == (finding, width):
            return
        self._shown = (document, finding, width)
        if not document.findings:
            self.update(no_findings_text(document))
        else:
            self.update(finding_body(document.findings[finding], document.exhibit(finding), width - BESIDE))

    def show_other(self, document: AnyDocument, entry: int, finding: int, key: str) -> None:
        """Say that the findings are about other tensors than the chosen one, and which keys lead there."""
        self._shown, verdict = None, document.entries[entry].verdict
        words = {"good": "no finding on this tensor", "unknown": "not checked"}.get(verdict, "")
        ways = f"n: finding {finding + 1} of {len(document.findings)}; {key}: all of them"
        self.update(Text.assemble((f"{UNICODE.of(verdict)} {words}", verdict_style(verdict)), (f"  {ways}", "dim")))


BESIDE, HEAD = 6, 74
"""Columns beside a card's text: its borders, padding and scroll bar; and those of a kind and a name in 80 columns."""


class CardBox(ScrollBox):
    """The box around a card; in a short window it has no border below."""

    def head(self, head: Text, key: str = "") -> None:
        """Write a finding's kind and name above, and which key shows all findings."""
        if self.screen.has_class("-short"):
            self.set_titles(Text.assemble(head, f" · {key}" if head and key else ""))
        else:
            self.set_titles(head, key)


def finding_head(document: AnyDocument, index: int) -> Text:
    """Write the kind of a finding, its tensor, how many findings there are, and how many the tensor has."""
    if not document.findings:
        return Text()
    finding = document.findings[index]
    kind = f"{UNICODE.of(finding.severity)} {finding.kind}"
    name = fitted(printable(finding.title), HEAD - len(kind))
    entry = document.by_finding.get(index)
    beside = len(document.entries[entry].findings) if entry is not None else 0
    more = f", {beside} on this tensor: n, N" if beside > 1 else ""
    count = (f"· finding {index + 1} of {len(document.findings)}", "dim")
    return Text.assemble((kind, "bold"), f" {name} " if name else " ", count, (more, "bold"))


def finding_body(finding: Finding, exhibit: Exhibit | None = None, width: int = COLUMNS) -> Group:
    """Write a finding: what is wrong, the likeliest cause's fix, what it is seen by, and its other rows.

    The fix comes before the cause: on a small terminal little below it is in view.
    """
    fix = [row for row in finding.advice if row[0] == "fix"][:1]
    above = [*fix, *((title, text) for title, text in finding.layouts if text not in finding.sentence)]
    below = [row for row in finding.advice if row not in fix]
    below += [("more", "; ".join(finding.details))] if finding.details else []
    labels = max((len(label) for label, _ in (*above, *below)), default=0)
    seen_by = [_inked(line) for line in exhibit_lines(exhibit, Terminal(max(width, 1)))] if exhibit else []
    return Group(Text(printable(finding.sentence)), _rows(above, labels), *seen_by, _rows(below, labels))


def lines_to_fix(finding: Finding, width: int) -> int:
    """Return the lines that a finding's sentence and the fix behind it take."""
    fix = [row for row in finding.advice if row[0] == "fix"][:1]
    labels = max((len(label) for label, _ in (*finding.layouts, *finding.advice)), default=0)
    shown = Group(Text(printable(finding.sentence)), _rows(fix, labels))
    return len(Console(width=max(width, 1)).render_lines(shown))


def _inked(line: Text) -> Text:
    """Return a line of an exhibit with its marked cells in the viewer's ink, which `NO_COLOR` does not turn to grey."""
    inks = {BAD: ink(VERMILLION, bold=True), GOOD: ink(GREEN)}
    line.spans = [Span(start, end, inks.get(str(style), style)) for start, end, style in line.spans]
    line.end = "\n"
    return line


def _rows(rows: list[tuple[str, str]], width: int) -> Table:
    """Write rows under each other, their labels in a column of so many characters."""
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(min_width=width)
    for label, value in rows:
        style = ink(GREEN, bold=True) if label == "fix" else ""
        table.add_row(Text(label, "bold" if label == "fix" else "dim"), Text(printable(value), style))
    return table


def no_findings_text(document: AnyDocument) -> Text:
    """Write the result of a check without findings, and what was not checked: identical layers once."""
    if document.report is None:
        why = f": {printable(document.failed)}" if document.failed else ""
        return verdict_text(document).append(why)
    count = document.report.num_tensors
    unchecked = len({reason.tensor for reason in document.report.not_checked if reason.tensor})
    if unchecked or not count:
        what = f": {unchecked:,} of {counted(count, 'tensor')} not checked" if count else ": the dump has no tensors"
        text = Text.assemble(("? no findings", verdict_style("unknown")), what)
    else:
        what = "matches its placements" if isinstance(document, Document) else "is whole"
        which = "the tensor" if count == 1 else f"each of {count:,} tensors"
        text = Text.assemble(("✓ no findings", verdict_style("good")), f": {which} {what}")
    if isinstance(document, Document):
        text.append(uncompared_text(not_compared(document.dump)), "dim")
    for reason in document.report.reasons:
        text.append(f"\n? not checked: {printable(reason)}", "dim")
    return text
