"""A checkpoint as text: its tensors with their chunks and files, one tensor with its bytes, the report of its check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.compare import notable
from shardviz.dump.pause import collector_paused
from shardviz.picture.text.findings import findings_lines
from shardviz.picture.text.report import not_checked_lines
from shardviz.picture.text.tables.table import table
from shardviz.picture.text.terminal import BAD, DIM, GOOD, WARNING, line, wrapped
from shardviz.text import bytes_text, counted, fold, listed, natural_key, printable

if TYPE_CHECKING:
    from rich.text import Text

    from shardviz.check.finding import Report
    from shardviz.checkpoint.compare import Comparison, Outcome
    from shardviz.checkpoint.records import Checkpoint, Chunk, Saved
    from shardviz.picture.text.terminal import Terminal

MOST_NAMES = 8
"""Names with the same fate that are written out, identical layers counted as one."""

MOST_CHUNKS = 64
"""Chunks of a tensor that are written out, unless all are asked for."""


def tensors_lines(checkpoint: Checkpoint) -> list[Text]:
    """Return a line for each tensor, identical layers folded, and one that sums them up."""
    rows = [("tensor", "type", "chunks", "files", "bytes")]
    with collector_paused():
        named = [(one.name, facts_of(one)) for one in in_order(checkpoint)]
    for names, (kind, chunks, files, size) in fold(named):
        many = len(names) if names.numbers else 1
        each = f"{many} x {bytes_text(size)}" if many > 1 else bytes_text(size)
        rows.append((printable(str(names)), kind, f"{chunks:,}", f"{files:,}", each))
    return [*(table(rows, left=2) if named else []), line(""), line((total(checkpoint), DIM))]


def in_order(checkpoint: Checkpoint) -> list[Saved]:
    """Return its tensors in the order of their names, numbers by value."""
    return sorted(checkpoint.tensors.values(), key=lambda one: natural_key(one.name))


def facts_of(one: Saved) -> tuple[str, int, int, int]:
    """Return a tensor's type and shape, how many chunks and files it is in, and its bytes."""
    return f"{one.dtype}[{', '.join(map(str, one.shape))}]", len(one.chunks), len(one.files), one.num_bytes


def total(checkpoint: Checkpoint) -> str:
    """Sum a checkpoint up in one line."""
    size = bytes_text(sum(one.num_bytes for one in checkpoint.tensors.values()))
    sizes = checkpoint.file_sizes
    missing = sum(found is None for found in sizes.values())
    lost = f", {missing:,} of them missing" if missing else ""
    objects = f", {counted(len(checkpoint.objects), 'other object')}" if checkpoint.objects else ""
    tensors = counted(len(checkpoint.tensors), "tensor")
    return f"{checkpoint.kind}: {tensors} of {size} in {counted(len(sizes), 'file')}{lost}{objects}"


def tensor_lines(one: Saved, *, all_chunks: bool = False) -> list[Text]:
    """Return which bytes of which file hold which part of a tensor."""
    kind, chunks, files, size = facts_of(one)
    head = f"  {kind}  {bytes_text(size)} in {counted(chunks, 'chunk')} of {counted(files, 'file')}"
    shown = one.chunks if all_chunks else one.chunks[:MOST_CHUNKS]
    rows = [("part", "file", "bytes"), *((str(chunk.region), *_place(chunk)) for chunk in shown)]
    more = len(one.chunks) - len(shown)
    rest = [line((f"{more:,} more: --all shows them", DIM))] if more else []
    return [line((printable(one.name), "bold"), head), *table(rows, left=2), *rest]


def _place(chunk: Chunk) -> tuple[str, str]:
    place = chunk.place
    return (
        ("nowhere", "")
        if place is None
        else (printable(place.file), f"{place.start:,} to {place.start + place.size:,}")
    )


def checkpoint_report_lines(checkpoint: Checkpoint, report: Report, terminal: Terminal) -> list[Text]:
    """Return the findings, what was not checked, and the verdict."""
    found, unchecked = findings_lines(report.findings, terminal), not_checked_lines(report, terminal)
    return [
        *([*found, line("")] if found else []),
        *([*unchecked, line("")] if unchecked else []),
        _verdict(checkpoint, report, terminal),
    ]


def comparison_lines(comparison: Comparison, terminal: Terminal) -> list[Text]:
    """Return every tensor that is not equal, those with the same words together, then notes, then the verdict."""
    lines: list[Text] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for one in comparison.outcomes:
        if one.verdict != "equal":
            groups.setdefault((one.verdict, why_text(one)), []).append(one.name)
    for (verdict, why), group in groups.items():
        good = verdict in ("tied", "not-compared")
        glyph = terminal.glyphs.unknown if good else terminal.glyphs.differs
        head = line((f"{glyph} {verdict}  ", WARNING if good else BAD))
        folds = [names for names, _ in fold((name, None) for name in group)]
        lines += wrapped(printable(listed(folds, MOST_NAMES)), terminal.width, head, 2)
        lines += wrapped(printable(why), terminal.width, line("  "), 2)
    for note in comparison.notes:
        lines += wrapped(printable(note), terminal.width, line((f"{terminal.glyphs.unknown} ", DIM)), 4)
    return [*lines, *([line("")] if lines else []), _sum(comparison, terminal)]


def why_text(one: Outcome) -> str:
    """Return what became of a tensor in words, with its other name where that is more than another beginning."""
    is_said = one.verdict in ("moved", "tied") or one.name.endswith(one.other) or one.other.endswith(one.name)
    return one.why if is_said else f"as {one.other}: {one.why}"


def _sum(comparison: Comparison, terminal: Terminal) -> Text:
    if comparison.differs:
        return line((f"{terminal.glyphs.differs} {notable(comparison)}", BAD))
    if comparison.counts["not-compared"]:
        return line((f"{terminal.glyphs.unknown} {notable(comparison)}", WARNING))
    return line((f"{terminal.glyphs.good} {counted(comparison.compared, 'tensor')} compared, all equal", GOOD))


def _verdict(checkpoint: Checkpoint, report: Report, terminal: Terminal) -> Text:
    tensors = counted(report.num_tensors, "tensor")
    files = counted(len(checkpoint.file_sizes), "file")
    if report.findings:
        names = {name for name in report.findings_of if name}
        where = f" in {len(names):,} of {tensors}" if names else f" in {tensors}"
        text = f"{counted(len(report.findings), 'finding')}{where}, {files}"
        return line((f"{terminal.glyphs.error} {text}", BAD))
    if not report.num_tensors:
        return line((f"{terminal.glyphs.unknown} {files} without a tensor", WARNING))
    names = {one.tensor for one in report.not_checked if one.tensor}
    but = f"; {listed(map(printable, sorted(names)), 3)} not checked" if names else ""
    glyph, style = (terminal.glyphs.unknown, WARNING) if names else (terminal.glyphs.good, GOOD)
    text = f"{glyph} the files have all of {tensors}, in {files}{but}"
    return line((text, style), ("; contents are compared by `shardviz diff`", DIM))
