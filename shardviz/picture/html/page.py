"""A whole run as one HTML file: findings first, the module tree with a map of each tensor, mesh, memory and comms.

It opens from disk, fetches nothing, runs no script, prints, and is read by keyboard and screen reader. Identical
layers share one map.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.verdicts import WORDS, not_compared
from shardviz.errors import ShardvizError
from shardviz.picture.exhibits.of_finding import exhibit_of
from shardviz.picture.html.parts import exhibit_table, section
from shardviz.picture.html.run import comms_section, memory_section, schedule_section
from shardviz.picture.html.style import style_sheet
from shardviz.picture.html.tree import Entry, rank_table, sign, tree
from shardviz.picture.markup import element, words
from shardviz.picture.model.heat import heats_of
from shardviz.picture.model.holders import mask_of, ranks_in_words, ranks_text
from shardviz.picture.model.subject import of_tensor
from shardviz.picture.svg.page import PATTERN, figure, mesh_figure
from shardviz.picture.text.report import listed_rows, step_results, step_text, summary_line
from shardviz.picture.text.terminal import UNICODE, Terminal
from shardviz.text import cut_at_comma, fold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.finding import Finding, Report
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.text import Fold

MOST_BYTES = 4_000_000
"""Characters of all maps together, those of findings first: with them the file stays under 5 MB."""

MOST_FINDINGS = 200

FULL = "the page is full; shardviz show draws it"


def html(dump: Dump, report: Report) -> str:
    """Write the page of a run.

    Args:
        dump: The dump's tensors.
        report: What the check found.
    """
    entries = _entries(dump, report)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = element(
        "head",
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        element("title", words(f"shardviz: {dump.files.path.name}")),
        f"<style>{style_sheet(dump.files.mesh.ranks)}</style>",
    )
    findings, shown = _findings(dump, report, entries)
    parts = {
        "findings": findings,
        "tensors": _tensors(entries, report, shown),
        "mesh": _mesh(dump, report),
        "memory": memory_section(dump),
        "comms": comms_section(dump),
        "schedule": schedule_section(dump),
    }
    body = element(
        "body",
        element("a", "Skip to the findings", href="#findings", class_="skip"),
        f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>',
        _header(dump, report),
        _nav([anchor for anchor, part in parts.items() if part]),
        element("main", *parts.values()),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _entries(dump: Dump, report: Report) -> list[Entry]:
    """Fold the names that share a line and a tensor, and describe as many as are drawn, the worst first."""
    by_name = dump.first_captured
    where = {id(tensor): at for at, tensor in enumerate(dump.tensors)}
    folded = fold((name, (row, where[id(by_name[name])])) for name, row in listed_rows(dump, report))
    order = sorted(range(len(folded)), key=lambda at: [*WORDS].index(folded[at][1][0].verdict))
    entries: dict[int, Entry] = {}
    left = MOST_BYTES
    for at in order:
        names, (row, index) = folded[at]
        picture, ranks, why = _drawn(dump, dump.tensors[index], names, report) if left > 0 else ("", "", FULL)
        entries[at] = Entry(at, names, row, picture, ranks, why)
        left -= len(picture) + len(ranks)
    return [entries[at] for at in range(len(folded))]


def _drawn(dump: Dump, tensor: Tensor, names: Fold, report: Report) -> tuple[str, str, str]:
    """Return a map and its table of ranks, or why they cannot be."""
    try:
        subject = of_tensor(dump, tensor, names.names()[0], report)
    except ShardvizError as error:
        return "", "", error.message
    drawn = figure(replace(subject, exhibits=()), style=False, headlines=False)
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
    return element(
        "header",
        element("p", "shardviz", class_="soft"),
        element("h1", words(dump.files.path.name)),
        element("p", words(summary.plain), class_=f"verdict {verdict}"),
        element("dl", *known, class_="facts"),
    )


_EMPTY = ("", element("code"))

TITLES = {
    "findings": "Findings",
    "tensors": "Tensors",
    "mesh": "Mesh",
    "memory": "Memory",
    "comms": "Communication",
    "schedule": "Schedule",
}


def _nav(anchors: Sequence[str]) -> str:
    links = (element("a", TITLES[anchor], href=f"#{anchor}") for anchor in anchors)
    return element("nav", *links, aria_label="Parts of this page")


def _findings(dump: Dump, report: Report, entries: Sequence[Entry]) -> tuple[str, dict[int, int]]:
    """Write every finding, and return for each entry the first finding about it, which has its map."""
    of_name = {name: entry for entry in entries for name in entry.folded.names()}
    parts, seen = [], dict[int, int]()
    for at, finding in enumerate(report.findings[:MOST_FINDINGS]):
        entry = of_name.get(finding.tensor)
        is_first = entry is not None and entry.picture != "" and entry.at not in seen
        seen_by = exhibit_of(dump, finding.each[0], report.laid_out)
        table = exhibit_table(seen_by) if seen_by else ""
        parts.append(_finding(at, finding, entry, table, drawn=is_first))
        if entry is not None and is_first:
            seen[entry.at] = at
    if len(report.findings) > MOST_FINDINGS:
        parts.append(element("p", f"{len(report.findings) - MOST_FINDINGS:,} more: shardviz check prints them"))
    if report.not_checked:
        folded_reasons = report.folded_not_checked
        items = (element("li", words(f"{names}: {why}" if str(names) else why)) for names, why in folded_reasons)
        parts.append(element("h3", "Not checked") + element("ul", *items))
    return section("findings", TITLES["findings"], *(parts or [element("p", "None.")])), seen


def _finding(at: int, finding: Finding, entry: Entry | None, table: str, *, drawn: bool) -> str:
    """Write one finding as an article: its summary, what it is seen by, layouts, cause, fix and picture."""
    is_error = finding.severity == "error"
    ranks = ranks_text(mask_of(finding.ranks))
    facts = [*((title, element("code", words(text))) for title, text in finding.layouts)]
    facts += [(title, words(text)) for title, text in finding.advice]
    facts += [("ranks", words(cut_at_comma(ranks, 80)))] if ranks else []
    picture = ""
    if entry is not None and entry.picture:
        link = element("a", "who holds what, rank by rank", href=f"#tensor-{entry.at}")
        picture = (entry.picture if drawn else "") + element("p", link)
    kind = element("span", f"{UNICODE.of(finding.severity)} ", words(finding.kind), class_="kind")
    return element(
        "article",
        element("h3", kind, " ", element("code", words(finding.title))),
        element("p", words(finding.summary)),
        table,
        element("dl", *(element("dt", title) + element("dd", text) for title, text in facts)),
        picture,
        id=f"finding-{at}",
        class_="error" if is_error else "warning",
    )


def _tensors(entries: Sequence[Entry], report: Report, shown: dict[int, int]) -> str:
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
    """Draw the mesh with the ranks that findings name, and a mesh for each number that is not the same on all ranks."""
    mesh, marked = dump.files.mesh, report.named_ranks
    about = f"≠ is named by a finding: {ranks_in_words(sorted(marked), 60)}" if marked else "No finding names a rank."
    parts = [element("figure", mesh_figure(mesh, style=False, marked=marked), tabindex=0)]
    for heat in heats_of(dump, report):
        least, most = heat.ends
        drawn = element("figure", mesh_figure(mesh, style=False, heat=heat), tabindex=0)
        parts.append(drawn if least < most else element("p", words(str(heat))))
    return section("mesh", TITLES["mesh"], element("p", words(mesh)), element("p", words(about), class_="soft"), *parts)
