"""Findings as text: what is wrong in numbers, claimed / held / intended under each other, cause and fix."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.text.terminal import BAD, DIM, WARNING, line, wrapped
from shardviz.text import fold, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.text import Text

    from shardviz.check.finding import Finding
    from shardviz.picture.text.terminal import Terminal
    from shardviz.text import Fold

NAME = "\0"
"""Stands for the tensor's name while findings that differ in nothing else are folded."""

INDENT = 12


def findings_lines(findings: Sequence[Finding], terminal: Terminal) -> list[Text]:
    """Return every finding; those that are the same for identical layers are told once."""
    lines: list[Text] = []
    for folded, finding in folded_findings(findings):
        lines += [*([line("")] if lines else []), *_finding_lines(folded, finding, terminal)]
    return lines


def folded_findings(findings: Sequence[Finding]) -> list[tuple[Fold, Finding]]:
    """Return each finding once for all the tensors that have it, in words that name them all."""
    folded = fold((finding.tensor, _nameless(finding)) for finding in findings)
    return [(names, finding.in_words(partial(_named, str(names)))) for names, finding in folded]


def _named(name: str, text: str) -> str:
    return text.replace(NAME, name)


def _nameless(finding: Finding) -> Finding:
    if not finding.tensor:
        return finding
    name = re.compile(rf"(?<![\w.]){re.escape(finding.tensor)}(?!\.?\w)")
    return replace(finding.in_words(partial(name.sub, NAME)), tensor="")


def _finding_lines(folded: Fold, finding: Finding, terminal: Terminal) -> list[Text]:
    is_error = finding.severity == "error"
    count = f" ({len(folded)} tensors)" if len(folded) > 1 else ""
    head = line(
        (f"{terminal.glyphs.of(finding.severity)} {finding.kind}", BAD if is_error else WARNING),
        (f"  {printable(str(folded))}{count}" if str(folded) else "", "bold"),
        (_ranks(finding.ranks), DIM),
    )
    lines = [head, *wrapped(printable(finding.summary), terminal.width, line("  "), 2)]
    for title, text in layouts_of(finding):
        lines.append(line((f"  {title:<{INDENT - 2}}", DIM), (printable(text), "bold")))
    for title, text in advice_of(finding):
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        lines += wrapped(printable(text), terminal.width, start, INDENT)
    return lines


def advice_of(finding: Finding) -> list[tuple[str, str]]:
    """Return what stands below a finding: its cause, its fix, what else would fit, references."""
    others = [("or", text) for text in finding.also]
    advice = (("cause", finding.cause), ("fix", finding.fix), *others, ("see", ", ".join(finding.refs)))
    return [(title, text) for title, text in advice if text]


def layouts_of(finding: Finding) -> Iterable[tuple[str, str]]:
    """Return what is claimed, held and intended, as far as it is known."""
    sides = (("claimed", finding.claimed), ("held", finding.held), ("intended", finding.intended))
    return ((title, text) for title, text in sides if text)


def _ranks(ranks: Sequence[int]) -> str:
    return f"  {ranks_in_words(ranks, 32)}" if ranks else ""
