"""Findings as text: what is wrong in numbers, claimed / held / intended under each other, cause and fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.finding import fold_findings
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.text.terminal import BAD, DIM, WARNING, line, wrapped
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.check.finding import Finding
    from shardviz.picture.text.terminal import Terminal
    from shardviz.text import Fold

INDENT = 12


def findings_lines(findings: Sequence[Finding], terminal: Terminal) -> list[Text]:
    """Return every finding; those that are the same for identical layers are printed once."""
    lines: list[Text] = []
    for folded, finding in fold_findings(findings):
        lines += [*([line("")] if lines else []), *_finding_lines(folded, finding, terminal)]
    return lines


def _finding_lines(folded: Fold, finding: Finding, terminal: Terminal) -> list[Text]:
    is_error = finding.severity == "error"
    count = f" ({len(folded)} tensors)" if len(folded) > 1 else ""
    head = line(
        (f"{terminal.glyphs.of(finding.severity)} {finding.kind}", BAD if is_error else WARNING),
        (f"  {printable(str(folded))}{count}" if str(folded) else "", "bold"),
        (_ranks(finding.ranks), DIM),
    )
    lines = [head, *wrapped(printable(finding.summary), terminal.width, line("  "), 2)]
    for title, text in finding.layouts:
        lines.append(line((f"  {title:<{INDENT - 2}}", DIM), (printable(text), "bold")))
    for title, text in finding.advice:
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        lines += wrapped(printable(text), terminal.width, start, INDENT)
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"  {ranks_in_words(ranks, 32)}" if ranks else ""
