"""Findings as text (claimed, held and intended layouts, cause, fix), and catalogue pages."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.text.terminal import BAD, DIM, WARNING, line, wrapped
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.explain.finding import Finding
    from shardviz.explain.pages import Page
    from shardviz.picture.text.terminal import Terminal

INDENT = 12

MOST_BEFORE_CAUSE = 4
"""Lines of tensors' names that stand before the cause; more stand after the fix."""

SHORT = 8
"""Titles of rows up to this length share a column; if one is longer, as names of causes are, each has its own line."""


def findings_lines(findings: Sequence[Finding], terminal: Terminal) -> list[Text]:
    """Return every finding; one that many tensors have is printed once, with their names, and so is a cause."""
    lines: list[Text] = []
    for advice, group in groupby(findings, key=lambda finding: finding.advice):
        first, *others = group
        as_above = [("cause", "as above")] if len(advice) > 1 else advice
        for finding, rows in ((first, advice), *((other, as_above) for other in others)):
            lines += [*([line("")] if lines else []), *_finding_lines(finding, rows, terminal)]
    return lines


def headline(finding: Finding, terminal: Terminal) -> list[Text]:
    """Return the kind of a finding, its tensors and ranks, and what is wrong in numbers."""
    is_error = finding.severity == "error"
    head = line(
        (f"{terminal.glyphs.of(finding.severity)} {finding.kind}", BAD if is_error else WARNING),
        (f"  {printable(finding.title)}" if finding.title else "", "bold"),
        (f"  {ranks_in_words(finding.ranks, 32)}" if finding.ranks else "", DIM),
    )
    heads = [head] if head.cell_len <= terminal.width else _wrapped_head(finding, head, terminal)
    return [*heads, *wrapped(printable(finding.summary), terminal.width, line("  "), 2)]


def _wrapped_head(finding: Finding, head: Text, terminal: Terminal) -> list[Text]:
    """Return a headline that is too long for a line: its tensors, then its ranks, on lines of their own."""
    ranks = ranks_in_words(finding.ranks, 32) if finding.ranks else ""
    begin = head[: cell_len(f"{terminal.glyphs.of(finding.severity)} {finding.kind}")]
    rows = wrapped(printable(finding.title), terminal.width, line(begin, "  "), 4)
    rows[0].stylize("bold", len(begin.plain))
    for row in rows[1:]:
        row.stylize("bold")
    fits = rows[-1].cell_len + 2 + cell_len(ranks) <= terminal.width
    last = [line(rows[-1], ("  " + ranks, DIM))] if fits else [rows[-1], line(("    " + ranks, DIM))]
    return [*rows[:-1], *(last if ranks else rows[-1:])]


def _finding_lines(finding: Finding, advice: Sequence[tuple[str, str]], terminal: Terminal) -> list[Text]:
    lines = headline(finding, terminal)
    names: list[Text] = []
    for title, text in finding.layouts:
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        if title in ("tensors", "and"):
            rows = wrapped(printable(text), terminal.width, start, INDENT)
            is_long = title == "tensors" and len(rows) > MOST_BEFORE_CAUSE
            (names if is_long else lines).extend(rows)
        else:  # layouts are copied, so no line breaks inside
            lines.append(line(start, (printable(text), "bold")))
    for title, text in advice:
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        lines += wrapped(printable(text), terminal.width, start, INDENT)
    return [*lines, *names]


def page_lines(page: Page, terminal: Terminal) -> list[Text]:
    """Return a page: its name, what happens, how one gets there, and its rows."""
    lines = [line((page.name, "bold"))]
    lines += wrapped(page.title, terminal.width, line("  "), 2)
    for paragraph in page.paragraphs:
        lines += [line(""), *wrapped(paragraph, terminal.width, line("  "), 2)]
    lines.append(line(""))
    are_short = all(len(title) <= SHORT for title, _ in page.rows)
    for title, text in page.rows:
        if are_short:
            lines += wrapped(text, terminal.width, line((f"  {title:<{SHORT + 2}}", DIM)), SHORT + 4)
        else:
            lines += [line((f"  {title}", "bold")), *wrapped(text, terminal.width, line("    "), 4)]
    return lines
