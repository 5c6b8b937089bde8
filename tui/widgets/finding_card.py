"""One finding in full: its sentence, claimed / held / intended under each other, its cause and its fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Span, Text
from textual.widgets import Static

from shardviz.check.verdicts import not_compared
from shardviz.picture.exhibits.exhibit import cut_to
from shardviz.picture.model.palette import GREEN, VERMILLION
from shardviz.picture.text.report import uncompared_text
from shardviz.picture.text.tables.exhibit import exhibit_lines
from shardviz.picture.text.terminal import BAD, GOOD, UNICODE, Terminal
from shardviz.text import counted, printable

from ..colours import ink, verdict_style
from ..model.names import shortened

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from shardviz.check.finding import Finding, Report
    from shardviz.picture.exhibits.exhibit import Exhibit

    from ..model.document import Document

MOST_NAME = 40


class FindingCard(Static):
    """A finding's sentence, layouts, fix and cause; without findings, the result of the check."""

    FEWER: ClassVar[int] = 4
    """Rows of a card's table where the card shares a small terminal with a map: so its fix is in view."""

    _shown: tuple[Document | None, int, bool] | None = None

    def show(self, document: Document | None, finding: int, *, short: bool = False) -> None:
        """Show one finding of a document; `short` with fewer rows of what it is seen by."""
        if self._shown is not None and self._shown[0] is document and self._shown[1:] == (finding, short):
            return
        self._shown = (document, finding, short)
        if document is None or not document.findings:
            self.update(verdict_text(document) if document else Text("reading …", "dim"))
        else:
            seen_by = document.exhibit(finding)
            seen_by = cut_to(seen_by, self.FEWER) if seen_by and short else seen_by
            self.update(finding_body(document.findings[finding], seen_by))


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


def finding_body(finding: Finding, exhibit: Exhibit | None = None) -> Group:
    """Write a finding: what is wrong, what it is seen by, the fix right after that, and its other rows.

    Args:
        finding: The finding.
        exhibit: What it is seen by; without it the layouts come before the fix.
    """
    details = [("more", "; ".join(finding.details))] if finding.details else []
    # The fix before the cause: on a small terminal nothing below it is in view.
    fixes = [row for row in finding.advice if row[0] == "fix"]
    others = [row for row in finding.advice if row[0] != "fix"]
    label = max(len(title) for title, _ in [*finding.layouts, *finding.advice, *details]) if details or fixes else 0
    layouts = [(title, text) for title, text in finding.layouts if text not in finding.sentence]
    seen_by = [_Seen(exhibit)] if exhibit else []
    above = [*fixes, *layouts] if seen_by else [*layouts, *fixes]
    rows = _rows([*above, *others, *details], label)
    return Group(Text(printable(finding.sentence)), *seen_by, rows)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a finding is seen by, with as many columns as there is room for."""

    exhibit: Exhibit

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield from map(_inked, exhibit_lines(self.exhibit, Terminal(options.max_width)))


def _inked(line: Text) -> Text:
    """Return a line of an exhibit with its marked cells in the viewer's ink, which `NO_COLOR` does not turn to grey."""
    inks = {BAD: ink(VERMILLION, bold=True), GOOD: ink(GREEN)}
    line.spans = [Span(start, end, inks.get(str(style), style)) for start, end, style in line.spans]
    line.end = "\n"
    return line


def _rows(rows: list[tuple[str, str]], width: int) -> Table:
    """Write rows under each other, their labels in a column of so many characters."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=width)
    for label, value in rows:
        style = ink(GREEN, bold=True) if label == "fix" else ""
        table.add_row(Text(label, "bold" if label == "fix" else "dim"), Text(printable(value), style))
    return table


def verdict_text(document: Document) -> Text:
    """Write the result of a check without findings, and what was not checked: identical layers once."""
    if document.failed:
        return Text.assemble(("? not checked: ", verdict_style("unknown")), printable(document.failed))
    if document.report is None:
        return Text("… reading" if document.is_partial else "… checking", "dim")
    text = _no_findings(document.report)
    text.append(uncompared_text(not_compared(document.dump)), "dim")
    for reason in document.report.reasons:
        text.append(f"\n? not checked: {printable(reason)}", "dim")
    return text


def _no_findings(report: Report) -> Text:
    """Say that tensors are in order only where all of them were looked at."""
    count, unchecked = report.num_tensors, len({one.tensor for one in report.not_checked if one.tensor})
    if unchecked or not count:
        return Text.assemble(
            ("? no findings", verdict_style("unknown")),
            f": {unchecked:,} of {counted(count, 'tensor')} not checked" if count else ": the dump has no tensors",
        )
    return Text.assemble(
        ("✓ no findings", verdict_style("good")),
        f": all {count:,} tensors match their placements" if count > 1 else ": the tensor matches its placements",
    )
