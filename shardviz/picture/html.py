"""A whole run as one HTML file: findings first, then the mesh, every tensor in a table, and a map of each.

It opens from disk, fetches nothing, runs no script, prints, and is read by keyboard and screen reader. Identical
layers share one map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.names import fold
from shardviz.picture.findings import folded_findings, layouts_of
from shardviz.picture.holders import mask_of, ranks_text
from shardviz.picture.html_style import PAGE_STYLE
from shardviz.picture.markup import element, words
from shardviz.picture.page import is_same, rank_rows
from shardviz.picture.report import Row, listed_rows, summary_line
from shardviz.picture.subject import of_tensor
from shardviz.picture.svg import PATTERN, STYLE, figure
from shardviz.picture.svg_mesh import mesh_drawing
from shardviz.picture.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardviz.check.finding import Finding, Report
    from shardviz.dump.tensors import Model, Tensor
    from shardviz.names import Fold
    from shardviz.picture.subject import Subject

MOST_BYTES = 4_000_000
"""Characters of all maps together, those of findings first: with them the file stays under 5 MB."""

MOST_ROWS = 40
"""Lines of ranks under a map."""

MOST_FINDINGS = 200

FULL = "the page has no more room; shardviz show draws it"

SIGNS = {"good": "✓", "unknown": "?", "warning": "!", "error": "✗"}
WORDS = {"good": "in order", "unknown": "not checked", "warning": "warning", "error": "finding"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table, with its map.

    Attributes:
        at: Its number, which makes its anchor.
        folded: The names that share it.
        row: What the table says of them.
        picture: Its map; empty where it is not drawn.
        ranks: Who holds what, as a table.
        why: Why it is not drawn; empty where it is.
    """

    at: int
    folded: Fold
    row: Row
    picture: str
    ranks: str
    why: str


def html(model: Model, report: Report) -> str:
    """Write the page of a run.

    Args:
        model: The dump's tensors.
        report: What the check found.
    """
    entries = _entries(model, report)
    title = f"shardviz: {model.dump.path.name}"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = element(
        "head",
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        element("title", words(title)),
        f"<style>{PAGE_STYLE}{STYLE}</style>",
    )
    findings, shown = _findings(report, entries)
    body = element(
        "body",
        element("a", "Skip to the findings", href="#findings", class_="skip"),
        f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>',
        _header(model, report),
        element("main", findings, _mesh(model), _table(entries), _section("maps", "Maps", *_maps(entries, shown))),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _entries(model: Model, report: Report) -> list[Entry]:
    """Fold the names that share a line and a tensor, and describe as many as are drawn, the worst first."""
    by_name: dict[str, Tensor] = {}
    for tensor in model.tensors:
        for name in tensor.names:
            by_name.setdefault(name, tensor)
    where = {id(tensor): at for at, tensor in enumerate(model.tensors)}
    folded = fold((name, (row, where[id(by_name[name])])) for name, row in listed_rows(model, report))
    worst = ("error", "warning", "unknown", "good")
    order = sorted(range(len(folded)), key=lambda at: worst.index(folded[at][1][0].verdict))
    entries: dict[int, Entry] = {}
    left = MOST_BYTES
    for at in order:
        names, (row, index) = folded[at]
        picture, ranks, why = _drawn(model, model.tensors[index], names) if left > 0 else ("", "", FULL)
        entries[at] = Entry(at, names, row, picture, ranks, why)
        left -= len(picture) + len(ranks)
    return [entries[at] for at in range(len(folded))]


def _drawn(model: Model, tensor: Tensor, names: Fold) -> tuple[str, str, str]:
    """Return a map and its table of ranks, or why they cannot be."""
    try:
        subject = of_tensor(model, tensor, names.names()[0])
    except ShardvizError as error:
        return "", "", error.message
    return element("figure", figure(subject, style=False), tabindex=0), _ranks(subject), ""


def _header(model: Model, report: Report) -> str:
    run = model.dump.run
    verdict = "bad" if report.findings else "unsure" if report.not_checked else "good"
    facts = f"mesh {model.dump.mesh}, {run.num_ranks:,} ranks, torch {run.torch}, shardviz {run.shardviz}"
    links = (("findings", "Findings"), ("mesh", "Mesh"), ("tensors", "Tensors"), ("maps", "Maps"))
    return element(
        "header",
        element("h1", words(model.dump.path.name)),
        element("p", words(summary_line(report, Terminal()).plain), class_=f"verdict {verdict}"),
        element("p", words(facts), class_="soft"),
        element("p", "command: ", element("code", words(" ".join(run.command))), class_="soft") if run.command else "",
        element(
            "nav", *(element("a", text, href=f"#{anchor}") for anchor, text in links), aria_label="Parts of this page"
        ),
    )


def _findings(report: Report, entries: Sequence[Entry]) -> tuple[str, set[int]]:
    """Write every finding, and return the entries whose maps stand in them: each under its first one."""
    of_name = {name: entry for entry in entries for name in entry.folded.names()}
    told = folded_findings(report.findings)
    parts, seen = [], set[int]()
    for names, finding in told[:MOST_FINDINGS]:
        entry = of_name.get(names.names()[0])
        is_first = entry is not None and entry.at not in seen
        parts.append(_finding(names, finding, entry, drawn=is_first))
        seen |= {entry.at} if entry is not None else set()
    if len(told) > MOST_FINDINGS:
        parts.append(element("p", f"{len(told) - MOST_FINDINGS:,} more: shardviz check prints them"))
    unchecked = fold((entry.tensor, entry.why) for entry in report.not_checked)
    if unchecked:
        items = (element("li", words(f"{names}: {why}" if str(names) else why)) for names, why in unchecked)
        parts.append(element("h3", "Not checked") + element("ul", *items))
    return _section("findings", "Findings", *(parts or [element("p", "None.")])), seen


def _finding(names: Fold, finding: Finding, entry: Entry | None, *, drawn: bool) -> str:
    """Write one finding as an article: what is wrong, the three layouts, cause and fix, the picture."""
    is_error = finding.severity == "error"
    sign, ranks = "✗" if is_error else "!", ranks_text(mask_of(finding.ranks))
    count = f" ({len(names):,} tensors)" if len(names) > 1 else ""
    facts = [*((title, element("code", words(text))) for title, text in layouts_of(finding))]
    facts += [(title, words(text)) for title, text in (("cause", finding.cause), ("fix", finding.fix)) if text]
    facts += [("see", words(", ".join(finding.refs)))] if finding.refs else []
    facts += [("ranks", words(ranks if len(ranks) <= 80 else f"{ranks[:80].rpartition(',')[0]},..."))] if ranks else []
    picture = ""
    if entry is not None and entry.picture:
        link = element("a", "who holds what, rank by rank", href=f"#tensor-{entry.at}")
        picture = (entry.picture if drawn else "") + element("p", link)
    return element(
        "article",
        element("h3", element("span", f"{sign} {words(finding.kind)}", class_="kind"), " ", words(f"{names}{count}")),
        element("p", words(finding.summary)),
        element("dl", *(element("dt", title) + element("dd", text) for title, text in facts)),
        picture,
        class_="error" if is_error else "warning",
    )


def _mesh(model: Model) -> str:
    drawn, mesh = mesh_drawing(model.dump.mesh), model.dump.mesh
    picture = element(
        "svg",
        element("title", words(f"mesh {mesh}")),
        drawn.markup,
        class_="sv",
        role="img",
        aria_label=f"mesh {mesh}: ranks {min(mesh.ranks)} to {max(mesh.ranks)} in a grid",
        width=drawn.width,
        height=drawn.height,
        viewBox=f"0 0 {drawn.width} {drawn.height}",
    )
    return _section("mesh", "Mesh", element("p", words(mesh)), element("figure", picture, tabindex=0))


def _table(entries: Sequence[Entry]) -> str:
    heads = ("Verdict", "Tensor", "Claimed layout", "On a rank")
    rows = []
    for entry in entries:
        verdict, count = entry.row.verdict, len(entry.folded)
        name = element("a", words(entry.folded), href=f"#tensor-{entry.at}")
        cells = (
            element("td", f"{SIGNS[verdict]} {WORDS[verdict]}", class_=verdict),
            element("th", name, f" ({count:,} tensors)" if count > 1 else "", scope="row"),
            element("td", element("code", words(entry.row.layout))),
            element("td", element("code", words(entry.row.local))),
        )
        rows.append(element("tr", *cells))
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    table = element("table", head, element("tbody", *rows))
    return _section("tensors", "Tensors", _scrolled(table, "Every tensor with its layout"))


def _maps(entries: Sequence[Entry], shown: Collection[int]) -> list[str]:
    """Write a part for each tensor, closed unless there is something wrong with it; maps are not drawn twice."""
    return [_map(entry, drawn=entry.at in shown) for entry in entries]


def _map(entry: Entry, *, drawn: bool) -> str:
    sign = f"{SIGNS[entry.row.verdict]} {words(entry.folded)}"
    picture = element("p", "Drawn under its finding.") if drawn else entry.picture
    inner = element("p", f"Not drawn: {words(entry.why)}") if entry.why else picture + entry.ranks
    opened = {"open": "open"} if entry.row.verdict != "good" else {}
    return element("details", element("summary", sign), inner, id=f"tensor-{entry.at}", **opened)


def _ranks(subject: Subject) -> str:
    """Write who should hold what and who holds what, as a table."""
    rows, left = rank_rows(subject, MOST_ROWS)
    heads = ("Ranks", "Claimed", *(("Held", "") if subject.holds else ()))
    body = []
    for row in rows:
        sign = () if not subject.holds else ("",) if is_same(row) else ("≠ not as claimed",)
        cells = (*row[: 3 if subject.holds else 2], *sign)
        marked = "error" if sign and sign[0] else None
        body.append(element("tr", *(element("td", words(cell)) for cell in cells), class_=marked))
    head = element("thead", element("tr", *(element("th", text, scope="col") for text in heads)))
    more = element("p", f"{left:,} more lines: shardviz show with --all prints them") if left else ""
    return _scrolled(element("table", head, element("tbody", *body)), "What each rank holds") + more


def _scrolled(table: str, label: str) -> str:
    """Let a wide table scroll by itself, by keyboard too."""
    return element("div", table, class_="wide", tabindex=0, role="region", aria_label=label)


def _section(anchor: str, title: str, *parts: str) -> str:
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *parts, id=anchor, aria_labelledby=f"{anchor}-title"
    )
