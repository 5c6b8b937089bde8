"""A job beside a checkpoint as one HTML page: what became of every tensor, what differs first, with a map of each.

As a run's page: nothing is fetched, no script runs but the page's own, and names are never read as markup.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.verdicts import worst
from shardviz.checkpoint.comparing.outcome import DIFFERENT, notable
from shardviz.errors import ShardvizError
from shardviz.picture.html.anchors import Anchors
from shardviz.picture.html.order import in_natural_order
from shardviz.picture.html.parts import coded, exhibit_table, here, names_of, section, tools, top
from shardviz.picture.html.script import page_of
from shardviz.picture.html.style import style_sheet
from shardviz.picture.html.tree import sign
from shardviz.picture.markup import element, words
from shardviz.picture.model.subjects.beside import beside
from shardviz.picture.model.subjects.stored import numbered
from shardviz.picture.svg.beside import beside_figure
from shardviz.picture.svg.style import PATTERN
from shardviz.picture.text.checkpoint import total, why_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, fold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardviz.check.verdicts import Verdict
    from shardviz.checkpoint.beside.job import Job
    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.text import Fold

MOST_BYTES = 4_000_000
"""Characters of all maps together, those of what differs first."""

MOST_LINES = 4000
"""Lines of tensors, identical layers together."""

FULL = "the page is full; shardviz diff JOB CHECKPOINT TENSOR -o FILE.svg draws it"
ORDERS = {"worst": "differences first", "model": "as listed", "name": "by name", "largest": "largest first"}
VERDICTS = {"error": "different", "unknown": "not compared", "good": "equal"}


def beside_html(comparison: Comparison, job: Job, checkpoint: Checkpoint) -> str:
    """Write the page of a job beside a checkpoint.

    Args:
        comparison: What became of every tensor.
        job: The job.
        checkpoint: The checkpoint.
    """
    numbers = numbered(checkpoint)
    return page_of(
        f"{job.path.name} beside {checkpoint.path.name}",
        style_sheet((*job.dump.files.mesh.ranks, *range(len(numbers)))),
        element("a", "Skip to the tensors", href="#tensors", class_="skip"),
        f'<svg width="0" height="0" aria-hidden="true" class="defs">{PATTERN}</svg>',
        _header(comparison, job, checkpoint),
        top({"tensors": "Tensors"}, tools(ORDERS, VERDICTS)),
        element("main", _tensors(comparison, job, checkpoint, numbers)),
    )


def verdict_of(outcome: Outcome) -> Verdict:
    """Return what became of a tensor as a verdict."""
    if outcome.verdict in DIFFERENT:
        return "error"
    return "good" if outcome.verdict == "equal" else "unknown"


def _header(comparison: Comparison, job: Job, checkpoint: Checkpoint) -> str:
    found = worst(map(verdict_of, comparison.outcomes))
    verdict = {"error": "bad", "unknown": "unsure"}.get(found, "good")
    ranks = counted(job.dump.files.run.num_ranks, "rank")
    return element(
        "header",
        element("p", "shardviz", class_="soft"),
        element("h1", words(f"{job.path.name} beside {checkpoint.path.name}")),
        element("p", words(f"{UNICODE.of(found)} {notable(comparison)}"), class_=f"verdict {verdict}"),
        element("p", words(f"{ranks} on mesh {job.dump.files.mesh}; {total(checkpoint)}"), class_="soft"),
        *(element("p", words(f"{UNICODE.unknown} {note}"), class_="soft") for note in comparison.notes),
    )


def _tensors(comparison: Comparison, job: Job, checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write a line for each tensor, identical layers folded, that opens on the map of the first."""
    of_name = {one.name: one for one in comparison.outcomes}
    found = ((one.name, _key(one, job)) for one in comparison.outcomes)
    folded = in_natural_order(fold(found))
    folded.sort(key=lambda line: [*VERDICTS].index(verdict_of(of_name[line[0].names()[0]])))
    anchors, left, lines = Anchors(), MOST_BYTES, []
    for names, _ in folded[:MOST_LINES]:
        first = of_name[names.names()[0]]
        picture = _picture(first, job, checkpoint, numbers) if left > 0 else element("p", f"Not drawn: {FULL}")
        left -= len(picture)
        lines.append(element("li", _line(anchors.of("tensor", first.name), names, first, picture, job, checkpoint)))
    more = len(folded) - MOST_LINES
    rest = element("p", f"{more:,} more lines: shardviz diff prints them") if more > 0 else ""
    usage = (
        "Open a line to see which rank claims which part, and which file has it. Parts are marked where a rank holds "
        "something else than the checkpoint has. Of several tensors the first is drawn."
    )
    return section("tensors", "Tensors", element("p", usage, class_="soft"), element("ul", *lines, class_="tree"), rest)


def _key(outcome: Outcome, job: Job) -> object:
    """Return what tensors of one line have in common."""
    live = job.tensors.get(outcome.name)
    return replace(outcome, name="", other=""), live and (live.shape, live.dtype)


def _line(anchor: str, names: Fold, first: Outcome, picture: str, job: Job, checkpoint: Checkpoint) -> str:
    verdict = verdict_of(first)
    count = element("span", f" {len(names):,} tensors", class_="soft") if len(names) > 1 else ""
    summary = element(
        "summary",
        sign(verdict),
        element("span", words(str(names)), count, class_="name"),
        element("span", words(first.verdict), class_="soft"),
    )
    facts = [(title, text) for title, text in (("cause", first.cause), ("fix", first.fix)) if text]
    said = element("p", coded(why_text(first))) if first.why else ""
    known = element("dl", *(element("dt", title) + element("dd", coded(text)) for title, text in facts))
    one = job.tensors.get(first.name) or checkpoint.tensors.get(first.name)
    return element(
        "details",
        summary,
        here(anchor),
        said,
        known if facts else "",
        picture,
        id=anchor,
        class_="leaf",
        open="open" if verdict == "error" else None,
        data_names=names_of(names),
        data_verdict=verdict,
        data_many=len(names),
        data_bytes=math.prod(one.shape) * len(names) if one is not None else 0,
    )


def _picture(outcome: Outcome, job: Job, checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    try:
        one = beside(outcome, job, checkpoint, numbers)
    except ShardvizError as error:
        return element("p", words(f"Not drawn: {error.message}"))
    table = exhibit_table(one.exhibit) if one.exhibit is not None else ""
    drawn = beside_figure(replace(one, exhibit=None), style=False, headlines=False)
    return element("figure", drawn, tabindex=0) + table
