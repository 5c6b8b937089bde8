"""A sum that is missing from a result because code drops the tensor that has it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.lines.fault import place_of
from shardviz.explain.finding import Finding
from shardviz.explain.step.lines import UnsummedLine
from shardviz.explain.step.modules import UnsummedModule
from shardviz.explain.step.sums import GradientNotReduced, OutputNotReduced, ResultNotRead, UnreducedBesideVector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.check.report import NotChecked
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import UnreadRecord


def with_unread(dump: Dump, results: Iterable[Finding | NotChecked]) -> Iterator[Finding | NotChecked]:
    """Yield a step's results, with the line that drops a sum in those that lack that sum."""
    records = [record for rank in dump.files.ranks.values() for record in rank.unread]
    for result in results:
        lacking = [record for record in records if isinstance(result, Finding) and _is_lacked(result, record)]
        yield _of_line(result, lacking[0]) if lacking and isinstance(result, Finding) else result


def _is_lacked(finding: Finding, record: UnreadRecord) -> bool:
    """Whether a finding lacks a sum over the axes of a call, of the gradient that it was given or of an output."""
    cause = finding.explanation
    if isinstance(cause, GradientNotReduced):
        return record.gradient == finding.tensor and set(record.axes) == set(cause.axes)
    if isinstance(cause, OutputNotReduced):
        return record.is_forward and set(record.axes) == set(cause.axes)
    if isinstance(cause, UnreducedBesideVector | UnsummedLine | UnsummedModule):
        return record.is_forward and record.axes == (cause.axis,)
    return False


def _of_line(finding: Finding, record: UnreadRecord) -> Finding:
    place = place_of(record.line)
    what = "a copy of the gradient" if record.is_in_place else "the gradient"
    of = f" of {what} of {record.gradient}" if record.gradient else ""
    ran = f"{place} `{record.line.source}` makes the sum{of} over {' and '.join(record.axes)}; nothing reads its result"
    named = replace(finding, line=place, details=(*finding.details, ran))
    return named.because(ResultNotRead(place, record.op, record.axes, is_copy=record.is_in_place))
