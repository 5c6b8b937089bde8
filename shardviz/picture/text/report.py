"""A check's report as text: a line for each tensor, the findings, the verdict; and catalogue pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len

from shardviz.check.step.comparison import agreement, is_of_parts
from shardviz.check.verdicts import captured, is_listed, not_compared, verdict_on, wrong_result
from shardviz.dump.records.step import WHOLE_LOSS
from shardviz.layout import notation
from shardviz.picture.model.holders import ranks_in_words
from shardviz.picture.text.terminal import BAD, DIM, GOOD, WARNING, line, pad, widest, wrapped
from shardviz.text import counted, fold, printable

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from rich.text import Text

    from shardviz.check.report import Report
    from shardviz.check.verdicts import Verdict
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.explain.pages import Page
    from shardviz.picture.text.terminal import Terminal

INDENT = 12

MOST_BEFORE_CAUSE = 4
"""Lines of tensors' names that stand before the cause; more stand after the fix."""

SHORT = 8
"""Titles of rows up to this length share a column; if one is longer, as names of causes are, each has its own line."""


def findings_lines(findings: Sequence[Finding], terminal: Terminal) -> list[Text]:
    """Return every finding; one that many tensors have is printed once, with their names, and so is a cause."""
    lines: list[Text] = []
    for advice, group in groupby(findings, key=lambda finding: finding.advice):
        first, *others = group
        as_above = [("cause", "as above")] if len(advice) > 1 else advice
        for finding, rows in ((first, advice), *((other, as_above) for other in others)):
            lines += [*([line("")] if lines else []), *_finding_lines(finding, rows, terminal)]
    return lines


def headline(finding: Finding, terminal: Terminal) -> list[Text]:
    """Return the kind of a finding, its tensors and ranks, and what is wrong in numbers."""
    is_error = finding.severity == "error"
    head = line(
        (f"{terminal.glyphs.of(finding.severity)} {finding.kind}", BAD if is_error else WARNING),
        (f"  {printable(finding.title)}" if finding.title else "", "bold"),
        (f"  {ranks_in_words(finding.ranks, 32)}" if finding.ranks else "", DIM),
    )
    heads = [head] if head.cell_len <= terminal.width else _wrapped_head(finding, head, terminal)
    return [*heads, *wrapped(printable(finding.summary), terminal.width, line("  "), 2)]


def _wrapped_head(finding: Finding, head: Text, terminal: Terminal) -> list[Text]:
    """Return a headline that is too long for a line: its tensors, then its ranks, on lines of their own."""
    ranks = ranks_in_words(finding.ranks, 32) if finding.ranks else ""
    begin = head[: cell_len(f"{terminal.glyphs.of(finding.severity)} {finding.kind}")]
    rows = wrapped(printable(finding.title), terminal.width, line(begin, "  "), 4)
    rows[0].stylize("bold", len(begin.plain))
    for row in rows[1:]:
        row.stylize("bold")
    fits = rows[-1].cell_len + 2 + cell_len(ranks) <= terminal.width
    last = [line(rows[-1], ("  " + ranks, DIM))] if fits else [rows[-1], line(("    " + ranks, DIM))]
    return [*rows[:-1], *(last if ranks else rows[-1:])]


def _finding_lines(finding: Finding, advice: Sequence[tuple[str, str]], terminal: Terminal) -> list[Text]:
    lines = headline(finding, terminal)
    names: list[Text] = []
    for title, text in finding.layouts:
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        if title in ("tensors", "and"):
            rows = wrapped(printable(text), terminal.width, start, INDENT)
            is_long = title == "tensors" and len(rows) > MOST_BEFORE_CAUSE
            (names if is_long else lines).extend(rows)
        else:  # layouts are copied, so no line breaks inside
            lines.append(line(start, (printable(text), "bold")))
    for title, text in advice:
        start = line((f"  {title:<{INDENT - 2}}", DIM))
        lines += wrapped(printable(text), terminal.width, start, INDENT)
    return [*lines, *names]


def page_lines(page: Page, terminal: Terminal) -> list[Text]:
    """Return a page: its name, what happens, how one gets there, and its rows."""
    lines = [line((page.name, "bold"))]
    lines += wrapped(page.title, terminal.width, line("  "), 2)
    for paragraph in page.paragraphs:
        lines += [line(""), *wrapped(paragraph, terminal.width, line("  "), 2)]
    lines.append(line(""))
    are_short = all(len(title) <= SHORT for title, _ in page.rows)
    for title, text in page.rows:
        if are_short:
            lines += wrapped(text, terminal.width, line((f"  {title:<{SHORT + 2}}", DIM)), SHORT + 4)
        else:
            lines += [line((f"  {title}", "bold")), *wrapped(text, terminal.width, line("    "), 4)]
    return lines


MOST_SHAPES = 3
"""Local shapes of one tensor that are written out."""

MAX_NAME = 60
"""Columns that names take at most; a longer name has a line of its own."""

STYLES: dict[Verdict, str] = {"error": BAD, "warning": WARNING, "unknown": WARNING, "good": GOOD, "pending": DIM}
"""The style of each verdict's glyph."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        verdict: The worst that is known of the tensor.
        layout: What it claims, in the notation.
        local: The shapes that ranks hold.
    """

    verdict: Verdict
    layout: str
    local: str


def report_lines(dump: Dump, report: Report, terminal: Terminal) -> list[Text]:
    """Return the whole report."""
    findings = findings_lines(report.findings, terminal)
    unchecked, step = not_checked_lines(report, terminal), step_text(dump)
    tensors = table_lines(dump, report, terminal)
    step_rows = wrapped(f"step: {step}", terminal.width, line("  "), 4) if step else []
    return [
        *([*tensors, line("")] if tensors else []),
        *([*findings, line("")] if findings else []),
        *([*unchecked, line("")] if unchecked else []),
        *(line((row.plain, DIM)) for row in step_rows),
        *summary_lines(report, terminal, step_results(dump), not_compared(dump)),
    ]


def step_results(dump: Dump) -> frozenset[str]:
    """Return the names of a step's outputs, activations and scalars, which aren't model tensors."""
    steps = (tensor for tensor in dump.at("step") if tensor.role in ("output", "scalar", "activation"))
    return frozenset(name for tensor in steps for name in tensor.names)


def step_text(dump: Dump) -> str:
    """Sum up the step's comparison with the unsharded model; empty if nothing was compared."""
    numbers = agreement(dump)
    if numbers is None:
        return ""
    right = (
        f"{counted(numbers.num_right, 'gradient')} within {numbers.largest_error_of_right:.2g}"
        if numbers.num_right
        else ""
    )
    far = numbers.largest_error_of_wrong
    off = f"off by up to {far:.2g}" if math.isfinite(far) else "wrong, with NaN or infinity"
    wrong = f"{counted(numbers.num_wrong, 'gradient')} {off}" if numbers.num_wrong else ""
    whose = "" if numbers.odd_rank is None else f" of rank {numbers.odd_rank}"
    is_of_means = dump.find("reference", "scalar", WHOLE_LOSS) is not None
    unsharded = "mean of the unsharded losses of all parts" if is_of_means or is_of_parts(dump) else "unsharded"
    losses = (
        "" if math.isnan(numbers.loss) else f"loss{whose} {numbers.loss:.9g}, {unsharded} {numbers.loss_wanted:.9g}"
    )
    return "; ".join(filter(None, [losses, right, wrong]))


def table_lines(dump: Dump, report: Report | None, terminal: Terminal) -> list[Text]:
    """Return a line for each tensor: its verdict, name, layout, and local shapes.

    Names whose lines are the same are folded.

    Args:
        report: What the check found; None if nothing was checked.
    """
    rows = [(printable(str(folded)), row) for folded, row in fold(listed_rows(dump, report))]
    width = widest(["tensor", *(name for name, _ in rows if cell_len(name) <= MAX_NAME)])
    layouts = widest(["layout", *(row.layout for _, row in rows)])
    heads = f"  {pad('tensor', width)}  {pad('layout', layouts)}  per rank"
    lines = [line((heads, DIM))] if rows else []
    for name, row in rows:
        lines += _row_lines(name, row, width, layouts, terminal, marked=report is not None)
    return lines


def listed_rows(dump: Dump, report: Report | None) -> list[tuple[str, Row]]:
    """Return every name that is listed, once, with its line."""
    rows: dict[str, Row] = {}
    for tensor in captured(dump):
        for name in tensor.names:
            if name not in rows and is_listed(dump, tensor, [name], report):
                verdict = verdict_on(dump, tensor, [name], report) if report else "unknown"
                rows[name] = _row(dump, tensor, name, verdict, wrong_result(tensor, [name], report))
    return list(rows.items())


def own_dtype(dump: Dump, tensor: Tensor, name: str) -> str:
    """Return the model's own dtype: it may have been stamped in a wider one."""
    own = dump.find("initial", tensor.role, name)
    return own.dtype if own else tensor.dtype


def _row(dump: Dump, tensor: Tensor, name: str, verdict: Verdict, wrong: str) -> Row:
    some = "" if len(tensor.shards) == len(dump.files.ranks) else f"  on {ranks_in_words(tuple(tensor.shards))}"
    some += f"  {wrong}" if wrong else ""
    role = "" if tensor.role == "param" else f" {tensor.role}"
    return Row(verdict, layout_text(tensor, own_dtype(dump, tensor, name)) + role, _local_text(tensor) + some)


def layout_text(tensor: Tensor, dtype: str = "") -> str:
    """Write what a tensor's placements claim; the shape alone if it has none.

    Args:
        tensor: What is captured of it.
        dtype: The model's own dtype, if that is another than the one captured.
    """
    dtype = dtype or tensor.dtype
    claims = list(tensor.claims)
    texts = {notation.write(claim) if claim else "" for claim in claims}
    if len(texts) > 1:
        return f"{len(texts)} different claims"
    if claims[0] is None:
        return f"{dtype}[{', '.join(map(str, tensor.shape))}] plain"
    return notation.write(claims[0], dtype)


def _local_text(tensor: Tensor) -> str:
    shapes = list(dict.fromkeys(shard.body.local_shape for shard in tensor.distinct))
    shown = " or ".join(str(list(shape)) for shape in shapes[:MOST_SHAPES])
    return shown if len(shapes) <= MOST_SHAPES else f"{shown} or {len(shapes) - MOST_SHAPES} more"


def _row_lines(name: str, row: Row, width: int, layouts: int, terminal: Terminal, *, marked: bool) -> list[Text]:
    glyph, style = (terminal.glyphs.of(row.verdict), STYLES[row.verdict]) if marked else (" ", "")
    rest = f"  {pad(row.layout, layouts)}  {row.local}"
    if cell_len(name) <= width:
        return [line((glyph, style), f" {pad(name, width)}{rest}")]
    return [line((glyph, style), f" {name}"), line(f"  {' ' * width}{rest}")]


def not_checked_lines(report: Report, terminal: Terminal) -> list[Text]:
    """Say which tensors could not be checked, and why; those with the same reason are folded."""
    lines: list[Text] = []
    for text in report.reasons:
        start = line((terminal.glyphs.unknown, WARNING), " not checked: ")
        lines += wrapped(printable(text), terminal.width, start, 4)
    return lines


def summary_line(
    report: Report, terminal: Terminal, results: Container[str] = (), uncompared: Sequence[str] = ()
) -> Text:
    """Sum up in one line: all in order, or how many findings in how many tensors.

    Args:
        results: Names that are not tensors of the model: a step's outputs and logged scalars.
        uncompared: What nothing was compared with, for a run without findings (`check.verdicts.not_compared`).
    """
    ranks = counted(report.num_ranks, "rank")
    names = {entry.tensor for entry in report.not_checked if entry.tensor}
    unchecked = len(names - set(report.findings_of))
    general = sum(1 for entry in report.not_checked if not entry.tensor)
    but = f"; {counted(unchecked, 'tensor')} not checked" if unchecked else ""
    but += f"; {counted(general, 'check')} not made" if general else ""
    if report.findings:
        text = f"{counted(len(report.findings), 'finding')}{_where_text(report, results)} on {ranks}{but}"
        return line((f"{terminal.glyphs.error} {text}", BAD))
    if report.num_tensors == 0:
        return line((f"{terminal.glyphs.unknown} the dump of {ranks} has no tensors{but}", WARNING))
    if unchecked:
        text = f"no findings in {counted(report.num_tensors, 'tensor')} on {ranks}{but}"
        return line((f"{terminal.glyphs.unknown} {text}", WARNING))
    many = f"all {counted(report.num_tensors, 'tensor')} are" if report.num_tensors > 1 else "the tensor is"
    return line((f"{terminal.glyphs.good} {many} in order on {ranks}{but}", GOOD), (uncompared_text(uncompared), DIM))


def summary_lines(
    report: Report, terminal: Terminal, results: Container[str] = (), uncompared: Sequence[str] = ()
) -> list[Text]:
    """Return `summary_line`, with what wasn't compared on a line of its own if it doesn't fit."""
    whole = summary_line(report, terminal, results, uncompared)
    if whole.cell_len <= terminal.width or not uncompared or report.findings:
        return [whole]
    below = wrapped(f"not compared: {', '.join(uncompared)}", terminal.width, line("  "), 2)
    return [summary_line(report, terminal, results), *(line((row.plain, DIM)) for row in below)]


def uncompared_text(things: Sequence[str]) -> str:
    """Name the results that were not compared, as the end of a line."""
    return f"; not compared: {', '.join(things)}" if things else ""


def _where_text(report: Report, results: Container[str]) -> str:
    names = {name for name in report.findings_of if name}
    tensors = sum(name not in results for name in names)
    of_all = f"{tensors:,} of " if tensors <= report.num_tensors else ""
    parts = [f"{of_all}{counted(max(tensors, report.num_tensors), 'tensor')}"] if tensors else []
    parts += [counted(len(names) - tensors, "result") + " of the step"] if len(names) > tensors else []
    return f" in {' and '.join(parts)}" if parts else ""
