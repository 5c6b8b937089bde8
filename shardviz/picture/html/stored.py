"""A checkpoint as one HTML page: alone with its findings, or compared with a job.

As a run's page: nothing is fetched, no script runs but the page's own, and names are never read as markup.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.verdicts import worst
from shardviz.checkpoint.comparing.outcome import DIFFERENT, counts_text
from shardviz.errors import ShardvizError
from shardviz.layout.dtypes import itemsize
from shardviz.picture.html.page import sign
from shardviz.picture.html.parts import (
    MOST_FINDINGS,
    Anchors,
    advice,
    article,
    bar,
    bytes_cell,
    exhibit_table,
    findings_section,
    full_page,
    header_of,
    in_natural_order,
    leaf,
    name_cell,
    page_of,
    search_tools,
    section,
    style_sheet,
    table,
    top_bar,
    with_code,
)
from shardviz.picture.markup import element, words
from shardviz.picture.model.palette import RANK_COLORS, rank_color
from shardviz.picture.model.stored import checkpoint_subject, comparison_subject, number_files
from shardviz.picture.svg.stored import beside_svg, stored_svg
from shardviz.picture.text.checkpoint import facts_of, in_order, total, why_text
from shardviz.picture.text.terminal import UNICODE
from shardviz.text import counted, fold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome
    from shardviz.checkpoint.live_job.job import Job
    from shardviz.checkpoint.records import Checkpoint, StoredTensor
    from shardviz.explain.finding import Finding
    from shardviz.text import Fold

MOST_BYTES = 4_000_000
"""Characters of all maps together."""

MOST_FILES = 1000

MOST_LINES = 4000
"""Lines of tensors, identical layers together."""

ORDERS = {"model": "as stored", "name": "by name", "largest": "largest first"}

TITLES = {"findings": "Findings", "files": "Files", "tensors": "Tensors"}

FULL = "the page is full; shardviz diff JOB CHECKPOINT TENSOR -o FILE.svg draws it"

ORDERS_BESIDE = {"worst": "differences first", "model": "as listed", "name": "by name", "largest": "largest first"}

VERDICTS = {"error": "different", "unknown": "not compared", "good": "equal"}


def stored_html(checkpoint: Checkpoint, report: Report) -> str:
    """Write the page of a checkpoint."""
    numbers = number_files(checkpoint)
    parts = _findings(report), _files(checkpoint, numbers), _tensors(checkpoint, numbers)
    colors = "".join(f".file{at}{{background:{color}}}" for at, color in enumerate(RANK_COLORS))
    style = style_sheet(range(len(numbers))) + colors
    header = _header(checkpoint, report)
    return full_page(checkpoint.path.name, style, "findings", header, top_bar(TITLES, search_tools(ORDERS)), *parts)


def stored_findings_html(checkpoint: Checkpoint, report: Report, finding: Finding | None = None) -> str:
    """Write the findings of a checkpoint as a page, below the verdict, or one alone."""
    parts = [_header(checkpoint, report), element("main", _findings(report))]
    if finding is not None:
        parts = [element("main", _finding(Anchors(), finding))]
    return page_of(checkpoint.path.name, style_sheet(()), *parts)


def _header(checkpoint: Checkpoint, report: Report) -> str:
    looked_at = f"the files have all of {counted(len(checkpoint.tensors), 'tensor')}"
    summary = counted(len(report.findings), "finding") if report.findings else looked_at
    verdict = "bad" if report.findings else "unsure" if report.not_checked else "good"
    glyph = UNICODE.of("error" if report.findings else "unknown" if report.not_checked else "good")
    known = element("p", words(total(checkpoint)), class_="soft")
    return header_of(checkpoint.path.name, verdict, f"{glyph} {summary}", known)


def _findings(report: Report) -> str:
    anchors = Anchors()
    return findings_section([_finding(anchors, one) for one in report.findings[:MOST_FINDINGS]], report)


def _finding(anchors: Anchors, finding: Finding) -> str:
    return article(anchors.of("finding", finding.kind, finding.tensor), finding, advice(finding))


def _files(checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write the files: their sizes, and how many tensors have a part in each."""
    sizes = checkpoint.file_sizes
    most = max((size or 0 for size in sizes.values()), default=0)
    counts = Counter(name for one in checkpoint.tensors.values() for name in one.files)
    rows = []
    for name, number in [*numbers.items()][:MOST_FILES]:
        size = sizes[name]
        color = f"file{rank_color(number)}"
        known = bytes_cell(size) if size is not None else element("span", "missing", class_="bad")
        key = element("span", class_=f"key {color}", aria_hidden="true") + str(number)
        rows.append([key, words(name), known, bar([(color, size or 0, "")], most), f"{counts[name]:,}"])
    more = len(numbers) - MOST_FILES
    rest = element("p", f"{more:,} more files") if more > 0 else ""
    return section("files", TITLES["files"], table(("", "File", "Size", "", "Tensors"), rows, "Files", left=2), rest)


def _tensors(checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write a line for each tensor, identical layers folded, that opens on the map of the first."""
    folded = in_natural_order(fold((one.name, (*facts_of(one),)) for one in in_order(checkpoint)))
    anchors, left, lines = Anchors(), MOST_BYTES, []
    for names, _ in folded[:MOST_LINES]:
        tensor = checkpoint.tensors[names.names()[0]]
        picture = _picture(tensor, numbers) if left > 0 else element("p", "The page is full: shardviz show draws it.")
        left -= len(picture)
        lines.append(_line(anchors.of("tensor", tensor.name), names, tensor, picture, is_open=len(folded) == 1))
    usage = "Open a line to see which file holds which part, drawn to scale. Of several tensors the first is drawn."
    return _tree(lines, len(folded), usage, "show")


def _tree(lines: Sequence[str], count: int, usage: str, command: str) -> str:
    """Write the first lines of so many, with how to use them and what prints the others."""
    tree = element("ul", *(element("li", line) for line in lines), class_="tree")
    more = count - len(lines)
    rest = element("p", f"{more:,} more lines: shardviz {command} prints them") if more > 0 else ""
    return section("tensors", TITLES["tensors"], element("p", usage, class_="soft"), tree, rest)


def _line(anchor: str, names: Fold, tensor: StoredTensor, picture: str, *, is_open: bool) -> str:
    kind, chunks, files, _ = facts_of(tensor)
    where = f"{counted(chunks, 'part')}, {counted(files, 'file')}"
    summary = element(
        "summary",
        name_cell(str(names), names),
        element("code", words(kind)),
        element("code", words(where), class_="soft"),
    )
    size = math.prod(tensor.shape) * itemsize(tensor.dtype) * len(names)
    return leaf(anchor, names, summary, picture, size=size, is_open=is_open)


def _picture(tensor: StoredTensor, numbers: Mapping[str, int]) -> str:
    try:
        return element("figure", stored_svg(checkpoint_subject(tensor, numbers), is_alone=False), tabindex=0)
    except ShardvizError as error:
        return element("p", words(f"Not drawn: {error.message}"))


def beside_html(comparison: Comparison, job: Job, checkpoint: Checkpoint) -> str:
    """Write the page of a job beside a checkpoint."""
    numbers = number_files(checkpoint)
    return full_page(
        f"{job.path.name} and {checkpoint.path.name}",
        style_sheet((*job.dump.files.mesh.ranks, *range(len(numbers)))),
        "tensors",
        _header_beside(comparison, job, checkpoint),
        top_bar({"tensors": "Tensors"}, search_tools(ORDERS_BESIDE, VERDICTS)),
        _tensors_beside(comparison, job, checkpoint, numbers),
    )


def verdict_of(outcome: Outcome) -> Verdict:
    """Return what became of a tensor as a verdict."""
    if outcome.verdict in DIFFERENT:
        return "error"
    return "good" if outcome.verdict == "equal" else "unknown"


def _header_beside(comparison: Comparison, job: Job, checkpoint: Checkpoint) -> str:
    worst_verdict = worst(map(verdict_of, comparison.outcomes))
    verdict = {"error": "bad", "unknown": "unsure"}.get(worst_verdict, "good")
    ranks = counted(job.dump.files.run.num_ranks, "rank")
    return header_of(
        f"{job.path.name} and {checkpoint.path.name}",
        verdict,
        f"{UNICODE.of(worst_verdict)} {counts_text(comparison)}",
        element("p", words(f"{ranks} on mesh {job.dump.files.mesh}; {total(checkpoint)}"), class_="soft"),
        *(element("p", words(f"{UNICODE.unknown} {note}"), class_="soft") for note in comparison.notes),
    )


def _tensors_beside(comparison: Comparison, job: Job, checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    """Write a line for each tensor, identical layers folded, that opens on the map of the first."""
    of_name = {one.name: one for one in comparison.outcomes}
    found = ((one.name, _key(one, job)) for one in comparison.outcomes)
    folded = in_natural_order(fold(found))
    folded.sort(key=lambda line: [*VERDICTS].index(verdict_of(of_name[line[0].names()[0]])))
    anchors, left, lines = Anchors(), MOST_BYTES, []
    for names, _ in folded[:MOST_LINES]:
        first = of_name[names.names()[0]]
        picture = _picture_beside(first, job, checkpoint, numbers) if left > 0 else element("p", f"Not drawn: {FULL}")
        left -= len(picture)
        lines.append(_line_beside(anchors.of("tensor", first.name), names, first, picture, job, checkpoint))
    usage = (
        "Open a line to see which rank claims which part, and which file has it. A part is marked if a rank holds "
        "something other than the checkpoint. Of several tensors the first is drawn."
    )
    return _tree(lines, len(folded), usage, "diff")


def _key(outcome: Outcome, job: Job) -> object:
    """Return what tensors of one line have in common."""
    live = job.tensors.get(outcome.name)
    return replace(outcome, name="", other=""), live and (live.shape, live.dtype)


def _line_beside(anchor: str, names: Fold, first: Outcome, picture: str, job: Job, checkpoint: Checkpoint) -> str:
    verdict = verdict_of(first)
    summary = element(
        "summary", sign(verdict), name_cell(str(names), names), element("span", words(first.verdict), class_="soft")
    )
    facts = [(title, text) for title, text in (("cause", first.cause), ("fix", first.fix)) if text]
    why = element("p", with_code(why_text(first))) if first.why else ""
    known = element("dl", *(element("dt", title) + element("dd", with_code(text)) for title, text in facts))
    tensor = job.tensors.get(first.name) or checkpoint.tensors.get(first.name)
    size = math.prod(tensor.shape) * len(names) if tensor is not None else 0
    inner = why, known if facts else "", picture
    return leaf(anchor, names, summary, *inner, size=size, is_open=verdict == "error", verdict=verdict)


def _picture_beside(outcome: Outcome, job: Job, checkpoint: Checkpoint, numbers: Mapping[str, int]) -> str:
    try:
        pair = comparison_subject(outcome, job, checkpoint, numbers)
    except ShardvizError as error:
        return element("p", words(f"Not drawn: {error.message}"))
    table = exhibit_table(pair.exhibit) if pair.exhibit is not None else ""
    drawn = beside_svg(replace(pair, exhibit=None), is_alone=False)
    return element("figure", drawn, tabindex=0) + table
