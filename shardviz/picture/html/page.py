"""A run as one HTML file: findings, the module tree with maps, mesh, memory and collectives.

It opens from disk, fetches nothing, runs only its own script, prints, and works with keyboard and screen reader.
Identical layers share one map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.types import table_of
from shardviz.check.verdicts import WORDS, not_compared, worst
from shardviz.errors import ShardvizError
from shardviz.layout.dtypes import itemsize
from shardviz.picture.exhibits.of_finding import exhibit_of
from shardviz.picture.html.parts import (
    MOST_FINDINGS,
    Anchors,
    advice,
    article,
    exhibit_table,
    findings_section,
    full_page,
    header_of,
    in_natural_order,
    leaf,
    name_cell,
    page_of,
    ranks_cell,
    scrolled,
    search_tools,
    section,
    style_sheet,
    top_bar,
)
from shardviz.picture.html.run import (
    comms_section,
    lines_section,
    memory_section,
    modules_section,
    plan_section,
    schedule_section,
)
from shardviz.picture.markup import element, words
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.mesh import heats_of
from shardviz.picture.model.palette import WRONG
from shardviz.picture.model.sides import NO_FILE
from shardviz.picture.model.step import step_heats, step_tree
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.svg.map import PATTERN
from shardviz.picture.svg.page import mesh_figure, svg
from shardviz.picture.text.ranks import rank_rows
from shardviz.picture.text.report import listed_rows, own_dtype, step_results, step_text, summary_line
from shardviz.picture.text.terminal import UNICODE, Terminal
from shardviz.text import fold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.picture.model.subject import Subject
    from shardviz.picture.text.ranks import RankRow
    from shardviz.picture.text.report import Row
    from shardviz.text import Fold

MOST_OPEN = 40
"""A tree of at most so many lines starts open; in a longer one only modules with findings are open."""

MOST_LEVELS = 12
"""How deep modules nest; deeper names are listed in the last module."""

MOST_ROWS = 40
"""Lines of ranks under a map."""

MOST_OPEN_ROWS = 8
"""A table of so many ranks or groups of ranks is open; a longer one is folded."""

Named = tuple[tuple[str, ...], "TreeEntry"]
"""The rest of a name, in its parts, and the entry that it names."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of the tree, with its map.

    Attributes:
        at: Its number.
        anchor: Where links to it lead.
        folded: The names that share it.
        row: The verdict, layout and local shapes that they share.
        bytes: Those of all its tensors, unsharded.
        picture: Its map; empty if it is not drawn.
        ranks: The parts of each rank, as a table.
        why: Why it is not drawn; empty if it is.
    """

    at: int
    anchor: str
    folded: Fold
    row: Row
    bytes: int
    picture: str
    ranks: str
    why: str


def tree(entries: Sequence[TreeEntry], shown: Mapping[int, str]) -> str:
    """Write the tree.

    Args:
        entries: Its lines, in the model's order.
        shown: By entry, the anchor of the finding under which its map is already drawn.
    """
    named = [(tuple(str(entry.folded).split(".")), entry) for entry in entries]
    return element("ul", *_items(named, shown, len(entries) <= MOST_OPEN, MOST_LEVELS), class_="tree")


def _items(named: Sequence[Named], shown: Mapping[int, str], is_open: bool, levels: int) -> Iterator[str]:
    """Write the content of a module; names that share their first part become a submodule."""
    groups: dict[str, list[Named]] = {}
    for at, (parts, entry) in enumerate(named):
        key = parts[0] if levels and len(parts) > 1 else f"{at} alone"
        groups.setdefault(key, []).append((parts, entry))
    for group in groups.values():
        if len(group) == 1:
            ((parts, entry),) = group
            yield element("li", _leaf(".".join(parts), entry, shown.get(entry.at)))
        else:
            yield element("li", _branch(group, shown, is_open, levels))


def _branch(group: Sequence[Named], shown: Mapping[int, str], is_open: bool, levels: int) -> str:
    shared = _num_shared_parts(group)
    name = ".".join(group[0][0][:shared])
    inner = [(parts[shared:], entry) for parts, entry in group]
    verdict = worst(entry.row.verdict for _, entry in group)
    count = sum(len(entry.folded) for _, entry in group)
    summary = element(
        "summary",
        sign(verdict),
        element("span", words(name), class_="name"),
        element("span", f"{count:,} tensors", class_="soft"),
    )
    opened = {"open": "open"} if is_open or verdict != "good" else {}
    return element("details", summary, element("ul", *_items(inner, shown, is_open, levels - 1)), **opened)


def _num_shared_parts(group: Sequence[Named]) -> int:
    """Return how many parts all names begin with, leaving each a name of its own."""
    most = min(len(parts) for parts, _ in group) - 1
    first = group[0][0]
    return next((at for at in range(most) if any(parts[at] != first[at] for parts, _ in group)), most)


def _leaf(name: str, entry: TreeEntry, finding: str | None) -> str:
    """Write a tensor's line, and under it its map and the parts of each rank."""
    summary = element(
        "summary",
        sign(entry.row.verdict),
        name_cell(name, entry.folded),
        element("code", words(entry.row.layout)),
        element("code", words(entry.row.local), class_="soft"),
    )
    link = element("p", "Drawn under ", element("a", "its finding", href=f"#{finding}"), ".")
    picture = entry.picture if finding is None else link
    inner = element("p", f"Not drawn: {words(entry.why)}") if entry.why else picture + entry.ranks
    verdict, is_open = entry.row.verdict, entry.row.verdict in ("error", "warning")
    return leaf(entry.anchor, entry.folded, summary, inner, size=entry.bytes, is_open=is_open, verdict=verdict)


def sign(verdict: Verdict) -> str:
    """Write a verdict as its glyph, and as a word for screen readers."""
    spoken = element("span", WORDS[verdict], class_="unseen")
    return element("span", element("span", UNICODE.of(verdict), aria_hidden="true"), spoken, class_=f"sign {verdict}")


def rank_table(subject: Subject) -> str:
    """Write the claimed and the held part of each rank, as a table."""
    rows, left = rank_rows(subject, MOST_ROWS)
    first, second = (title.capitalize() for title in subject.sides.titles)
    marks = [_mark(row, first.lower()) for row in rows]
    heads = ("Ranks", first, *((second,) if subject.holds else ()), *(("",) if subject.holds or any(marks) else ()))
    body = []
    for row, mark in zip(rows, marks, strict=True):
        cells = (row.ranks, row.claims, row.holds if subject.holds else mark, mark)[: len(heads)]
        marked = "error" if mark else None
        body.append(element("tr", *(element("td", words(cell)) for cell in cells), class_=marked))
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    more = element("p", f"{left:,} more lines: shardviz show with --all prints them") if left else ""
    written = (
        scrolled(element("table", head, element("tbody", *body), class_="sortable"), "What each rank holds") + more
    )
    summary = element("summary", f"Rank by rank: {len(rows) + left:,} different parts")
    opened = "open" if len(rows) <= MOST_OPEN_ROWS else None
    return element("details", summary, written, class_="ranks", open=opened)


def _mark(row: RankRow, should: str) -> str:
    """Say what is wrong with a row's ranks, if anything is."""
    if row.holds == NO_FILE:
        return f"{WRONG} left {NO_FILE}"
    if not row.is_same:
        return f"{WRONG} not as {should}"
    return f"{WRONG} named by the finding" if row.is_named else ""


MOST_BYTES = 4_000_000
"""Characters of all maps together, those of findings first: with them the file stays under 5 MB."""

FULL = "the page is full; shardviz show draws it"


def html(dump: Dump, report: Report) -> str:
    """Write the page of a run."""
    entries = _entries(dump, report)
    findings, shown = _findings(dump, report, entries)
    parts = {
        "plan": plan_section(dump),
        "findings": findings,
        "tensors": _tensors(entries, report, shown),
        "mesh": _mesh(dump, report),
        "memory": memory_section(dump),
        "comms": comms_section(dump),
        "schedule": schedule_section(dump),
        "modules": _modules(dump, report),
        "lines": lines_section(table_of(dump)),
    }
    links = {anchor: TITLES[anchor] for anchor, part in parts.items() if part}
    verdicts: dict[str, str] = {
        verdict: text for verdict, text in WORDS.items() if any(one.row.verdict == verdict for one in entries)
    }
    return full_page(
        dump.files.path.name,
        style_sheet(dump.files.mesh.ranks),
        "findings",
        _header(dump, report),
        top_bar(links, search_tools(ORDERS, verdicts)),
        *parts.values(),
    )


def findings_html(dump: Dump, report: Report, finding: Finding | None = None) -> str:
    """Write a page of all findings, or of one, with maps of their tensors only.

    Args:
        finding: The only finding to write; None for all of them, below the verdict.
    """
    findings = report.findings if finding is None else (finding,)
    drawn = _entries(dump, report, {name for one in findings for name in one.tensors})
    entries = [replace(entry, anchor="") for entry in drawn]  # nothing is there to link to
    parts = [_header(dump, report), element("main", _findings(dump, report, entries)[0])]
    if finding is not None:
        parts = [element("main", *_articles(dump, replace(report, findings=findings), entries)[0])]
    defs = f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>'
    return page_of(dump.files.path.name, style_sheet(dump.files.mesh.ranks), defs, *parts)


ORDERS = {"model": "as in the model", "worst": "findings first", "name": "by name", "largest": "largest first"}


def _modules(dump: Dump, report: Report) -> str:
    found = step_tree(dump, report.findings)
    return modules_section(found, step_heats(dump) if found.finding is not None else [])


def _entries(dump: Dump, report: Report, only: Collection[str] | None = None) -> list[TreeEntry]:
    """Fold the tensors into entries, and draw as many as there is room for, the worst first."""
    listed = [(name, row) for name, row in listed_rows(dump, report) if only is None or name in only]
    by_name = dump.first_captured
    where = {id(tensor): at for at, tensor in enumerate(dump.tensors)}
    folded = in_natural_order(fold((name, (row, where[id(by_name[name])])) for name, row in listed))
    order = sorted(range(len(folded)), key=lambda at: [*WORDS].index(folded[at][1][0].verdict))
    entries: dict[int, TreeEntry] = {}
    anchors, left = Anchors(), MOST_BYTES
    for at in order:
        names, (row, index) = folded[at]
        tensor = dump.tensors[index]
        picture, ranks, why = _map_of(dump, tensor, names, report) if left > 0 else ("", "", FULL)
        size = math.prod(tensor.shape) * itemsize(own_dtype(dump, tensor, names.names()[0])) * len(names)
        entries[at] = TreeEntry(at, anchors.of("tensor", names.names()[0]), names, row, size, picture, ranks, why)
        left -= len(picture) + len(ranks)
    return [entries[at] for at in range(len(folded))]


def _map_of(dump: Dump, tensor: Tensor, names: Fold, report: Report) -> tuple[str, str, str]:
    """Return a map and its table of ranks, or why they cannot be."""
    try:
        subject = of_tensor(dump, tensor, names.names()[0], report)
    except ShardvizError as error:
        return "", "", error.message
    drawn = svg(replace(subject, exhibits=()), is_alone=False)
    return element("figure", drawn, tabindex=0), rank_table(subject), ""


def _header(dump: Dump, report: Report) -> str:
    run = dump.files.run
    summary = summary_line(report, Terminal(), step_results(dump), not_compared(dump))
    verdict = "bad" if report.findings else "unsure" if report.not_checked else "good"
    facts = [
        ("mesh", words(dump.files.mesh)),
        ("ranks", f"{run.num_ranks:,}"),
        ("tensors", f"{report.num_tensors:,}"),
        ("torch", words(run.torch)),
        ("shardviz", words(run.shardviz)),
        ("step", words(step_text(dump))),
        ("command", element("code", words(" ".join(run.command)))),
    ]
    known = (element("div", element("dt", title), element("dd", text)) for title, text in facts if text not in _EMPTY)
    return header_of(dump.files.path.name, verdict, summary.plain, element("dl", *known, class_="facts"))


_EMPTY = ("", element("code"))
TITLES = {
    "plan": "Plan",
    "findings": "Findings",
    "tensors": "Tensors",
    "mesh": "Mesh",
    "memory": "Memory",
    "comms": "Communication",
    "schedule": "Schedule",
    "modules": "Step by module",
    "lines": "First wrong line",
}


def _findings(dump: Dump, report: Report, entries: Sequence[TreeEntry]) -> tuple[str, dict[int, str]]:
    """Write the findings section; return it with the anchor of each entry's first finding."""
    parts, seen = _articles(dump, report, entries)
    return findings_section(parts, report), seen


def _articles(dump: Dump, report: Report, entries: Sequence[TreeEntry]) -> tuple[list[str], dict[int, str]]:
    """Write the first findings, and return the anchors of those with a map, by entry."""
    of_name = {name: entry for entry in entries for name in entry.folded.names()}
    parts, seen, anchors = [], dict[int, str](), Anchors()
    for finding in report.findings[:MOST_FINDINGS]:
        entry = of_name.get(next(iter(finding.tensors), ""))
        is_first = entry is not None and entry.picture != "" and entry.at not in seen
        seen_by = exhibit_of(dump, finding, report.laid_out)
        table = exhibit_table(seen_by) if seen_by else ""
        anchor = anchors.of("finding", finding.kind, finding.tensor)
        parts.append(_finding(anchor, finding, entry, table, drawn=is_first))
        if entry is not None and is_first:
            seen[entry.at] = anchor
    return parts, seen


def _finding(anchor: str, finding: Finding, entry: TreeEntry | None, table: str, *, drawn: bool) -> str:
    """Write one finding as an article: summary, table, layouts, cause, fix and picture."""
    facts = [*((title, element("code", words(text))) for title, text in finding.layouts), *advice(finding)]
    facts += [("ranks", ranks_cell(finding.ranks))] if finding.ranks else []
    picture = ""
    if entry is not None and entry.picture:
        link = element("a", "who holds what, rank by rank", href=f"#{entry.anchor}")
        picture = (entry.picture if drawn else "") + (element("p", link) if entry.anchor else "")
    return article(anchor, finding, facts, table, picture)


def _tensors(entries: Sequence[TreeEntry], report: Report, shown: dict[int, str]) -> str:
    """Write the module tree, and explain its signs."""
    usage = (
        "Open a line to see which ranks hold which part of the tensor, drawn to scale. "
        "Point at a part to light up everything that its ranks hold."
    )
    final = (verdict for verdict in reversed(WORDS) if verdict != "pending")
    signs = (element("span", sign(verdict), " ", WORDS[verdict]) for verdict in final)
    many = f"{report.num_tensors:,} tensors in {len(entries):,} lines: identical layers share one."
    about = element("p", f"{many} " if len(entries) < report.num_tensors else "", usage, class_="soft")
    return section("tensors", TITLES["tensors"], about, element("p", *signs, class_="keys"), tree(entries, shown))


def _mesh(dump: Dump, report: Report) -> str:
    """Draw the mesh with the ranks that findings name, and a heat map for each uneven number."""
    mesh, marked = dump.files.mesh, report.named_ranks
    about = (
        f"{WRONG} is named by a finding: {ranks_in_words(sorted(marked), 60)}" if marked else "No finding names a rank."
    )
    parts = [element("figure", mesh_figure(mesh, style=False, marked=marked), tabindex=0)]
    for heat in heats_of(dump, report):
        least, most = heat.ends
        drawn = element("figure", mesh_figure(mesh, style=False, heat=heat), tabindex=0)
        parts.append(drawn if least < most else element("p", words(str(heat))))
    return section("mesh", TITLES["mesh"], element("p", words(mesh)), element("p", words(about), class_="soft"), *parts)
