"""Changes between two dumps as text: before above after, identical layers folded."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from shardviz.check.report import names_of, reasons_of
from shardviz.picture.model.step import step_of
from shardviz.picture.text.report import findings_lines
from shardviz.picture.text.step import heat_lines, tree_lines
from shardviz.picture.text.terminal import BAD, DIM, GOOD, WARNING, line, table, wrapped
from shardviz.text import counted, fold, folded_names, join_numbers, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from shardviz.check.diff import Change, Difference
    from shardviz.check.step.departure import StepDifference
    from shardviz.picture.text.terminal import Terminal
    from shardviz.plan.alternatives import Size
    from shardviz.text import Fold

JOBS_AGREE = "the jobs agree up to this step's gradients; to compare its update, trace the next step too"
UPDATES_AGREE = "the jobs agree in this step and the weights after it"
MOST_BUFFERS = 3
WHY_UNJUDGED = (
    "Statistics of a rank's own rows may differ; if training reads these buffers, trace a later step, too "
    "(--trace-step 2): what reads them differs there if they are wrong"
)
MOST_NAMES = 8
"""Places of one cause whose names are written out, identical layers counted as one."""


def difference_lines(difference: Difference, terminal: Terminal) -> list[Text]:
    """Return the bytes of two plans, every change, findings lost and gained, and the verdict."""
    lines = _size_lines(difference.sizes)
    lines += _change_lines(difference.changes, terminal)
    lines += _step_lines(difference.step, terminal, is_clean=not difference)
    if difference.relaid:
        lines += wrapped(printable(_relaid_text(difference.relaid)), terminal.width, line(("  ", DIM)), 2)
    for title, findings in (("findings lost", difference.lost), ("findings gained", difference.gained)):
        if findings:
            lines += [line((title, "bold")), *findings_lines(findings, terminal), line("")]
    for reason in reasons_of(difference.not_compared):
        text = printable(f"not compared: {reason}")
        lines += wrapped(text, terminal.width, line((f"{terminal.glyphs.unknown} ", DIM)), 4)
    if difference.unjudged_buffers:
        names = folded_names(difference.unjudged_buffers, MOST_BUFFERS)
        text = printable(f"not judged: what a forward may have written to buffers: {names}. {WHY_UNJUDGED}")
        lines += wrapped(text, terminal.width, line((f"{terminal.glyphs.unknown} ", DIM)), 4)
    return [*lines, _verdict(difference, terminal)]


def _change_lines(changes: Sequence[Change], terminal: Terminal) -> list[Text]:
    """Return every change; layers whose values differ are folded, with the numbers of the first."""
    lines: list[Text] = []
    by_tensor = {(change.tensor, change.aspect): change for change in changes}
    groups: dict[Change, list[Fold]] = {}
    for names, shared in fold((change.tensor, _shared_by_layers(change)) for change in changes):
        has_numbers = shared.aspect == "values" and not shared.after
        groups.setdefault(replace(shared, tensor=str(names) if has_numbers else ""), []).append(names)
    for shared, folds in groups.items():
        change = by_tensor[folds[0].names()[0], shared.aspect]
        such_as = f" in {change.tensor}" if shared.tensor and len(folds[0]) > 1 else ""
        title = printable(names_of(folds))
        lines += wrapped(title, terminal.width, line((f"{terminal.glyphs.differs} {change.aspect}  ", BAD)), 4)
        lines += _row("first", f"{change.before}{such_as}", terminal) if change.before else []
        lines += [*_row("second", change.after, terminal), line("")]
    return lines


def _shared_by_layers(change: Change) -> Change:
    """Return what layers share that are printed as one: not the numbers of values."""
    is_numbers = change.aspect == "values" and bool(change.before)
    return replace(change, tensor="", before="", after="") if is_numbers else replace(change, tensor="")


def _row(title: str, text: str, terminal: Terminal) -> list[Text]:
    return wrapped(printable(text), terminal.width, line((f"  {title:8}", DIM)), 10)


def _size_lines(sizes: Sequence[Size]) -> list[Text]:
    """Return a table of the bytes of two plans, with what has changed."""
    rows: list[list[str]] = []
    for title, own in groupby(sizes, key=lambda size: size.title):
        rows += [[title, *(("", "", "") if rows else ("first", "second", "change"))], *(size.cells() for size in own)]
    return [*table(rows), line("")] if rows else []


def _step_lines(step: StepDifference, terminal: Terminal, *, is_clean: bool) -> list[Text]:
    """Return in what the steps differ, causes first, and at how much of them they agree: a ✓ if nothing differs."""
    lines: list[Text] = []
    for _, group in groupby(step.departures, key=lambda departure: departure.why or departure):
        departure, *others = group  # one cause, with the numbers of the first
        sign = (terminal.glyphs.unknown, WARNING) if departure.is_expected else (terminal.glyphs.differs, BAD)
        where = ", ".join(filter(None, (departure.direction, departure.place)))
        lines.append(line((f"{sign[0]} step", sign[1]), (f"  {printable(where)}", "bold")))
        lines += _row("differs", departure.sentence, terminal)
        if departure.why:
            lines += _row("why", departure.why, terminal)
        if departure.explanation is not None:
            lines += _row("see", departure.explanation.page_command, terminal)
        if departure.following > 0:
            calls = counted(departure.following, "call")
            lines += _row(
                "follows", f"{calls} of other modules differ too: they contain it or use its results", terminal
            )
        if departure.look:
            lines += _row("look", departure.look, terminal)
        if others:
            names = folded_names((departure.place for departure in others), MOST_NAMES)
            lines += _row("also", f"{names}: the same cause", terminal)
        lines.append(line(""))
    lines += _picture_lines(step, terminal)
    if step.num_compared:
        sign = (f"{terminal.glyphs.good} ", GOOD) if is_clean else ("  ", DIM)
        lines += wrapped(agreement(step), terminal.width, line(sign), 2)
    return lines


def _picture_lines(step: StepDifference, terminal: Terminal) -> list[Text]:
    """Return the modules around a step's first wrong one, and one rank's values of both jobs."""
    tree, heats = step_of(step)
    if tree is None or tree.finding is None:
        return []
    lines = [*tree_lines(tree, terminal), line("")]
    for heat in heats[:1]:
        lines += [*heat_lines(heat, terminal.glyphs, tree.reference), line("")]
    return lines


def agreement(step: StepDifference) -> str:
    """Say at how many places two steps agree, and how nearly."""
    dtypes = f" ({' and '.join(dict.fromkeys(step.precision))})" if any(step.precision) else ""
    what = "other place" if step.departures and step.is_of_jobs else "place"
    text = f"step: {step.agreement} at {counted(step.num_compared, what)}{dtypes}"
    if not step.farthest:
        return f"{text}, exactly"
    size = "largest value" if step.is_of_jobs else "norm"
    allowed = f" (rounding allows {step.allowed:.2g})" if step.allowed else ""
    return f"{text}: off by at most {step.farthest:.2g} of the {size}{allowed}"


def _relaid_text(changes: Sequence[Change]) -> str:
    """Say that two jobs lay tensors out differently, and show the first of them."""
    (name, first), *others = fold((change.tensor, replace(change, tensor="")) for change in changes)
    others_too = f", and {counted(len(others), 'other layout')}" if others else ""
    return f"layouts differ, as two jobs' may: {name} {first.before} and {first.after}{others_too}"


def _of_jobs(step: StepDifference) -> str:
    if not step.has_update:
        return JOBS_AGREE
    if not step.num_later:
        return UPDATES_AGREE
    later = counted(step.num_later, "later step")
    has_all_rows = bool(step.num_with_rows) and not step.without_rows
    has_all_outputs = step.num_with_outputs == step.num_later
    what = "rows and optimizer settings" if has_all_rows else "optimizer settings"
    if has_all_outputs:
        what = f"the model's outputs, {what}"
    text = f"{UPDATES_AGREE}; {what} also in {later}"
    if step.num_with_rows and step.without_rows:
        steps = f"step{'s' if len(step.without_rows) > 1 else ''} {join_numbers(step.without_rows)}"
        text += f", and rows in all but {steps}"
    if step.num_with_outputs and not has_all_outputs:
        text += f"; the model's outputs in {step.num_with_outputs} of the {step.num_later}"
    return text


def _verdict(difference: Difference, terminal: Terminal) -> Text:
    but = counted(len(difference.not_compared), "comparison") + " not made" if difference.not_compared else ""
    if not difference and difference.unread:
        text = f"nothing changed in what was compared; not compared: what {named_ranks(difference.unread)} held"
        return line((f"{terminal.glyphs.unknown} {text}", WARNING))
    if not difference and but:
        return line((f"{terminal.glyphs.unknown} no changes found; {but}", WARNING))
    if not difference:
        text = _of_jobs(difference.step) if difference.step.is_of_jobs else "nothing changed"
        return line((f"{terminal.glyphs.good} {text}", GOOD))
    changes = (
        (len(difference.changes), "change", ""),
        (len(difference.step.departures), "difference", " of the step"),
        (len(difference.gained), "finding", " gained"),
        (len(difference.lost), "finding", " lost"),
        (sum(size.is_changed for size in difference.sizes), "size", " changed"),
    )
    counts = ", ".join(f"{counted(count, what)}{which}" for count, what, which in changes if count)
    return line((f"{terminal.glyphs.differs} {counts}{f'; {but}' if but else ''}", BAD))
