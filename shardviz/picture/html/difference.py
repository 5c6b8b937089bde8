"""Two jobs' steps as one HTML page: in what they differ, and the step as a tree with the first wrong module opened.

As a run's page: nothing is fetched, no script runs but the page's own, and names are never read as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.html.parts import coded, section, top
from shardviz.picture.html.script import header_of, page_of, style_sheet
from shardviz.picture.html.step_tree import modules_section
from shardviz.picture.markup import element, words
from shardviz.picture.model.step_heat import step_of
from shardviz.picture.text.difference import agreement
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.report import NotChecked
    from shardviz.check.step.runs.departure import Departure, StepDifference

TITLES = {"differences": "Differences", "modules": "Step by module", "left": "Not compared"}


def difference_html(title: str, step: StepDifference) -> str:
    """Write the page of two jobs' steps."""
    tree, heats = step_of(step)
    parts = {
        "differences": section("differences", "Differences", *map(_departure, step.departures)) * bool(step.departures),
        "modules": modules_section(tree, heats) if tree is not None else "",
        "left": _left(step.not_compared),
    }
    ranks = step.beside.evidence.dump.files.mesh.ranks if step.beside is not None else ()
    return page_of(
        title,
        style_sheet(ranks),
        element("a", "Skip to the differences", href="#differences", class_="skip"),
        _header(title, step),
        top({anchor: TITLES[anchor] for anchor, part in parts.items() if part}, ""),
        element("main", *parts.values()),
    )


def _header(title: str, step: StepDifference) -> str:
    count = f"{counted(len(step.departures), 'difference')} of the step" if step.departures else "the steps agree"
    glyph = UNICODE.differs if step else UNICODE.good
    known = element("p", words(agreement(step)), class_="soft") if step.num_compared else ""
    return header_of(title, "bad" if step else "good", f"{glyph} {count}", known)


def _departure(departure: Departure) -> str:
    facts = {"differs": departure.sentence, "why": departure.why}
    if departure.following > 0:
        facts["follows"] = f"{counted(departure.following, 'call')} of other modules differ too"
    rows = (element("dt", title) + element("dd", coded(text)) for title, text in facts.items() if text)
    return element("h3", words(departure.module or "the model itself")) + element("dl", *rows)


def _left(not_compared: Sequence[NotChecked]) -> str:
    lines = (element("li", words(f"{one.tensor}: {one.why}" if one.tensor else one.why)) for one in not_compared)
    return section("left", "Not compared", element("ul", *lines)) if not_compared else ""
