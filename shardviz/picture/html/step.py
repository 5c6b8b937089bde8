"""A step's modules on a run's page, the first wrong one open; a page for two jobs' steps.

As on a run's page nothing is fetched, no script runs but the page's own, and names are never read as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.html.parts import header_of, page_of, section, style_sheet, top_bar, with_code
from shardviz.picture.markup import element, words
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.model.step import SHORT, SIDES, step_of
from shardviz.picture.text.difference import agreement
from shardviz.picture.text.step import side_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.lines.types import Row, Table
    from shardviz.check.step.runs.departure import Departure, StepDifference
    from shardviz.picture.model.step import Node, StepHeat, StepTree


LEVELS = 9

MOST_CALLS = 400
"""Calls that have a line on the page; of a larger step, those around the first wrong one."""

HEADS = ("line", "source", "call", "type", "each rank has", "gradient")


def modules_section(tree: StepTree, heats: Sequence[StepHeat]) -> str:
    """Write the calls of a step's modules; nothing if it was not followed."""
    if not tree.num_calls:
        return ""
    about = (
        f"{counted(tree.num_calls, 'call')} of modules in the order in which they ran, compared with {tree.reference}'s"
    )
    whole = tree.num_calls <= MOST_CALLS
    nodes = "".join(_node(root, tree.reference, is_whole=whole) for root in tree.roots)
    return section(
        "modules",
        "Step by module",
        element("p", words(about), class_="soft"),
        *(_heat(heat, tree.reference) for heat in heats),
        element("ul", nodes),
    )


def _node(node: Node, reference: str, *, is_whole: bool) -> str:
    line = _line(node, reference)
    leads_to_wrong = node.has_first or node.wrong_inside > 0
    if not node.children or not (is_whole or leads_to_wrong):
        return element("li", line)
    inner = element("ul", "".join(_node(child, reference, is_whole=is_whole) for child in node.children))
    is_open = "" if leads_to_wrong or not node.call.module else None
    return element("li", element("details", element("summary", line), inner, open=is_open))


def _line(node: Node, reference: str) -> str:
    glyph = UNICODE.of(node.verdict) if node.verdict != "unknown" else UNICODE.unknown
    name = element("strong" if node.is_first else "span", words(node.name))
    sides = "; ".join(f"{SHORT[side]}: {side_text(node, side, reference)}" for side in SIDES if node.state(side))
    first = element("strong", " first wrong module", class_="wrong") if node.is_first else ""
    wrong = f" {UNICODE.error} {', '.join(node.wrong)}" if node.wrong else ""
    first += element("strong", words(wrong), class_="wrong") if wrong else ""
    kind = element("span", words(f" {node.call.type}"), class_="soft")
    detail = element("span", words(f" {sides}"), class_="soft") if node.verdict == "error" else ""
    return f"{glyph} {name}{kind}{first}{detail}"


def _heat(heat: StepHeat, reference: str) -> str:
    title = f"{ranks_in_words(heat.ranks, 40)}, {list(heat.shape)} of {heat.layout}"
    heads = (("has", "has"), ("due", reference.removeprefix("the ")), ("off", "difference"))
    fields = "".join(
        element("td", _field(heat.levels(name, LEVELS), wrong=name == "off"), class_="heat") for name, _ in heads
    )
    titles = "".join(element("th", words(head), scope="col") for _, head in heads)
    scale = f"largest {heat.most:.4g}; largest difference {heat.farthest:.4g} (rounding allows {heat.allowed:.4g})"
    caption = element("caption", words(f"{title}: {scale}"))
    table = element("table", caption, element("tr", titles), element("tr", fields), class_="exhibit")
    return element("div", table, class_="wide", tabindex=0, role="region", aria_label=title)


def _field(rows: list[list[int]], *, wrong: bool) -> str:
    """Draw a field: darker cells are larger, and each says its level to who cannot see it."""
    color = "213,94,0" if wrong else "0,114,178"
    cells = []
    for row in rows:
        for at in row:
            style = f"display:inline-block;width:.6em;height:.9em;background:rgba({color},{at / (LEVELS - 1):.2f})"
            cells.append(element("span", style=style))
        cells.append("<br>")
    least, most = min(map(min, rows)), max(map(max, rows))
    label = f"{len(rows)} by {len(rows[0])} blocks, from {least} to {most} of {LEVELS - 1}"
    return element("div", *cells, role="img", aria_label=label)


def lines_section(table: Table | None) -> str:
    """Write the lines of the module that ranks looked into; nothing if they looked into none."""
    if table is None or not table.rows:
        return ""
    heads = element("tr", "".join(element("th", words(head), scope="col") for head in HEADS))
    body = element("table", heads, *map(_line_row, table.rows), class_="exhibit")
    wide = element("div", body, class_="wide", tabindex=0, role="region", aria_label="lines")
    return section("lines", words(f"Lines of {table.module or 'the model'}"), wide)


def _line_row(row: Row) -> str:
    cells = (row.place, row.source, row.function, row.types_text, row.held, row.gradient)
    line = (
        element("strong", words(f"{row.place} first wrong line"), class_="wrong") if row.is_wrong else words(row.place)
    )
    source = element("code", words(row.source))
    return element("tr", *(element("td", text) for text in (line, source, *map(words, cells[2:]))))


TITLES = {"differences": "Differences", "modules": "Step by module", "left": "Not compared"}


def difference_html(title: str, step: StepDifference) -> str:
    """Write the page of two jobs' steps."""
    tree, heats = step_of(step)
    parts = {
        "differences": section("differences", "Differences", *map(_departure, step.departures)) * bool(step.departures),
        "modules": modules_section(tree, heats) if tree is not None else "",
        "left": _uncompared_text(step.not_compared),
    }
    ranks = step.sides.evidence.dump.files.mesh.ranks if step.sides is not None else ()
    return page_of(
        title,
        style_sheet(ranks),
        element("a", "Skip to the differences", href="#differences", class_="skip"),
        _header(title, step),
        top_bar({anchor: TITLES[anchor] for anchor, part in parts.items() if part}, ""),
        element("main", *parts.values()),
    )


def _header(title: str, step: StepDifference) -> str:
    count = f"{counted(len(step.departures), 'difference')} of the step" if step.departures else "the steps agree"
    glyph = UNICODE.differs if step else UNICODE.good
    known = element("p", words(agreement(step)), class_="soft") if step.num_compared else ""
    return header_of(title, "bad" if step else "good", f"{glyph} {count}", known)


def _departure(departure: Departure) -> str:
    facts = {"differs": departure.sentence, "why": departure.why, "look": departure.look}
    if departure.following > 0:
        facts["follows"] = f"{counted(departure.following, 'call')} of other modules differ too"
    rows = (element("dt", title) + element("dd", with_code(text)) for title, text in facts.items() if text)
    return element("h3", words(departure.module or "the model itself")) + element("dl", *rows)


def _uncompared_text(not_compared: Sequence[NotChecked]) -> str:
    lines = (element("li", words(f"{one.tensor}: {one.why}" if one.tensor else one.why)) for one in not_compared)
    return section("left", "Not compared", element("ul", *lines)) if not_compared else ""
