"""A checkpoint as one HTML page: findings first, its files with their sizes, its tensors with a map of each.

As a run's page: nothing is fetched, no script runs but the page's own, and names are never read as markup.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.layout.dtypes import itemsize
from shardviz.picture.html.parts import (
    Anchors,
    advice,
    bar,
    bytes_cell,
    here,
    in_natural_order,
    names_of,
    section,
    table,
    tools,
    top,
)
from shardviz.picture.html.script import page_of, style_sheet
from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import RANK_COLOURS, rank_colour
from shardviz.picture.model.subjects.stored import numbered, stored
from shardviz.picture.svg.stored import stored_figure
from shardviz.picture.svg.tile import PATTERN
from shardviz.picture.text.checkpoint import facts_of, in_order, total
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, fold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.report import Report
    from shardviz.checkpoint.records import Checkpoint, Saved
    from shardviz.explain.finding import Finding
    from shardviz.text import Fold

MOST_BYTES = 4_000_000
"""Characters of all maps together."""

MOST_FINDINGS = 200
MOST_FILES = 1000
MOST_LINES = 4000
"""Lines of tensors, identical layers together."""

ORDERS = {"model": "as stored", "name": "by name", "largest": "largest first"}
TITLES = {"findings": "Findings", "files": "Files", "tensors": "Tensors"}


def stored_html(checkpoint: Checkpoint, report: Report) -> str:
    """Write the page of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        report: What the check of it found.
    """
    numbers = numbered(checkpoint)
    parts = _findings(report), _files(checkpoint, numbers), _tensors(checkpoint, numbers)
    return page_of(
        checkpoint.path.name,
        style_sheet(range(len(numbers))) + _colours(),
        element("a", "Skip to the findings", href="#findings", class_="skip"),
        f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>',
        _header(checkpoint, report),
        top(TITLES, tools(ORDERS)),
        element("main", *parts),
    )


def stored_findings_html(checkpoint: Checkpoint, report: Report, finding: Finding | None = None) -> str:
    """Write the findings of a checkpoint as a page, below the verdict, or one alone."""
    parts = [_header(checkpoint, report), element("main", _findings(report))]
    if finding is not None:
        parts = [element("main", _finding(Anchors(), finding))]
    return page_of(checkpoint.path.name, style_sheet(()), *parts)


def _colours() -> str:
    """Return the rules for bars and keys in the colours of files."""
    return "".join(f".file{at}{{background:{colour}}}" for at, colour in enumerate(RANK_COLOURS))


def _header(checkpoint: Checkpoint, report: Report) -> str:
    looked_at = f"the files have all of {counted(len(checkpoint.tensors), 'tensor')}"
    found = counted(len(report.findings), "finding") if report.findings else looked_at
    verdict = "bad" if report.findings else "unsure" if report.not_checked else "good"
    glyph = UNICODE.of("error" if report.findings else "unknown" if report.not_checked else "good")
    return element(
        "header",
        element("p", "shardviz", class_="soft"),
        element("h1", words(checkpoint.path.name)),
        element("p", words(f"{glyph} {found}"), class_=f"verdict {verdict}"),
        element("p", words(total(checkpoint)), class_="soft"),
    )


def _findings(report: Report) -> str:
    anchors = Anchors()
    parts = [_finding(anchors, one) for one in report.findings[:MOST_FINDINGS]]
    if len(report.findings) > MOST_FINDINGS:
        parts.append(element("p", f"{len(report.findings) - MOST_FINDINGS:,} more: shardviz check prints them"))
    if report.not_checked:
        items = (element("li", words(text)) for text in report.reasons)
        parts.append(element("h3", "Not checked") + element("ul", *items))
    return section("findings", TITLES["findings"], *(parts or [element("p", "None.")]))


def _finding(anchors: Anchors, finding: Finding) -> str:
    kind = element("span", f"{UNICODE.of(finding.severity)} ", words(finding.kind), class_="kind")
    facts = (element("dt", title) + element("dd", text) for title, text in advice(finding))
    anchor = anchors.of("finding", finding.kind, finding.tensor)
    return element(
        "article",
        element("h3", kind, " ", element("code", words(finding.title)), here(anchor)),
        element("p", words(finding.summary)),
        element("dl", *facts),
        id=anchor,
        class_="error" if finding.severity == "error" else "warning",
        data_names=" ".join(map(names_of, finding.folds)),
    )


def _files(checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write the files: their sizes, and how many tensors have a part in each."""
    sizes = checkpoint.file_sizes
    most = max((size or 0 for size in sizes.values()), default=0)
    own = Counter(name for one in checkpoint.tensors.values() for name in one.files)
    rows = []
    for name, number in [*numbers.items()][:MOST_FILES]:
        size = sizes[name]
        colour = f"file{rank_colour(number)}"
        known = bytes_cell(size) if size is not None else element("span", "missing", class_="bad")
        key = element("span", class_=f"key {colour}", aria_hidden="true") + str(number)
        rows.append([key, words(name), known, bar([(colour, size or 0, "")], most), f"{own[name]:,}"])
    more = len(numbers) - MOST_FILES
    rest = element("p", f"{more:,} more files") if more > 0 else ""
    return section("files", TITLES["files"], table(("", "File", "Size", "", "Tensors"), rows, "Files", left=2), rest)


def _tensors(checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write a line for each tensor, identical layers folded, that opens on the map of the first."""
    folded = in_natural_order(fold((one.name, (*facts_of(one),)) for one in in_order(checkpoint)))
    anchors, left, lines = Anchors(), MOST_BYTES, []
    for names, _ in folded[:MOST_LINES]:
        one = checkpoint.tensors[names.names()[0]]
        picture = _picture(one, numbers) if left > 0 else element("p", "The page is full: shardviz show draws it.")
        left -= len(picture)
        anchor = anchors.of("tensor", names.names()[0])
        lines.append(element("li", _line(anchor, names, one, picture, is_open=len(folded) == 1)))
    more = len(folded) - MOST_LINES
    rest = element("p", f"{more:,} more lines: shardviz show prints them") if more > 0 else ""
    usage = "Open a line to see which file holds which part, drawn to scale. Of several tensors the first is drawn."
    return section(
        "tensors", TITLES["tensors"], element("p", usage, class_="soft"), element("ul", *lines, class_="tree"), rest
    )


def _line(anchor: str, names: Fold, one: Saved, picture: str, *, is_open: bool) -> str:
    kind, chunks, files, _ = facts_of(one)
    count = element("span", f" {len(names):,} tensors", class_="soft") if len(names) > 1 else ""
    where = f"{counted(chunks, 'part')}, {counted(files, 'file')}"
    summary = element(
        "summary",
        element("span", words(str(names)), count, class_="name"),
        element("code", words(kind)),
        element("code", words(where), class_="soft"),
    )
    return element(
        "details",
        summary,
        here(anchor),
        picture,
        id=anchor,
        class_="leaf",
        open="open" if is_open else None,
        data_names=names_of(names),
        data_many=len(names),
        data_bytes=math.prod(one.shape) * itemsize(one.dtype) * len(names),
    )


def _picture(one: Saved, numbers: Mapping[str, int]) -> str:
    try:
        return element("figure", stored_figure(stored(one, numbers), style=False), tabindex=0)
    except ShardvizError as error:
        return element("p", words(f"Not drawn: {error.message}"))
