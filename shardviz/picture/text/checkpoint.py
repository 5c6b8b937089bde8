"""A checkpoint as text: its tensors, files and chunks, one tensor's bytes, and its check."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.outcome import counts_text
from shardviz.checkpoint.maps.numbering import starred
from shardviz.checkpoint.records import file_size
from shardviz.machine import collector_paused
from shardviz.picture.text.report import findings_lines, not_checked_lines
from shardviz.picture.text.terminal import BAD, DIM, GOOD, WARNING, line, table, wrapped
from shardviz.text import bytes_text, counted, fold, folded_names, listed, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.text import Text

    from shardviz.check.report import Report
    from shardviz.checkpoint.comparing.outcome import Comparison, Outcome
    from shardviz.checkpoint.records import Checkpoint, Chunk, StoredTensor
    from shardviz.picture.text.terminal import Terminal

MOST_NAMES = 8
"""Names with the same fate that are written out, identical layers counted as one."""

MOST_CHUNKS = 64
"""Chunks of a tensor that are written out, unless all are asked for."""

MOST_FILES = 16
"""Files that are listed."""

_DIGITS = re.compile(r"[0-9][0-9,]*")
_OF_NAMES = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.)|(?<![^\s])[0-9]{1,9}(?=\.)|(?<=\.)[0-9]{1,9}(?![^\s])")


def tensors_lines(checkpoint: Checkpoint) -> list[Text]:
    """Return a line for each tensor, identical layers folded, and one that sums them up."""
    rows = [("tensor", "type", "chunks", "files", "bytes")]
    with collector_paused():
        named = [(one.name, facts_of(one)) for one in in_order(checkpoint)]
    for names, (kind, chunks, files, size) in fold(named):
        many = len(names) if names.numbers else 1
        each = f"{many} x {bytes_text(size)}" if many > 1 else bytes_text(size)
        rows.append((printable(str(names)), kind, f"{chunks:,}", f"{files:,}", each))
    listed_files = files_lines(checkpoint) if len(checkpoint.file_sizes) > 1 else []
    tensors = table(rows, left=2) if named else []
    return [*tensors, line(""), *([*listed_files, line("")] if listed_files else []), line((total(checkpoint), DIM))]


def files_lines(checkpoint: Checkpoint) -> list[Text]:
    """Return a line for each of the first files: its bytes, and how many tensors are in it."""
    sizes = checkpoint.file_sizes
    counts = Counter(name for one in checkpoint.tensors.values() for name in one.files)
    names = sorted(sizes, key=natural_key)
    shown = names[:MOST_FILES]
    rows = [
        ("file", "bytes", "tensors"),
        *((printable(name), _size(sizes[name]), f"{counts[name]:,}") for name in shown),
    ]
    rest = [sizes[name] or 0 for name in names[len(shown) :]]
    more = f"{counted(len(rest), 'more file')} of {bytes_text(min(rest))} to {bytes_text(max(rest))}" if rest else ""
    return [*table(rows, left=1), *([line((more, DIM))] if more else [])]


def _size(size: int | None) -> str:
    return "missing" if size is None else bytes_text(size)


def in_order(checkpoint: Checkpoint) -> list[StoredTensor]:
    """Return its tensors in the order of their names, numbers by value."""
    return sorted(checkpoint.tensors.values(), key=lambda one: natural_key(one.name))


def facts_of(tensor: StoredTensor) -> tuple[str, int, int, int]:
    """Return a tensor's type and shape, how many chunks and files it is in, and its bytes."""
    return _kind(tensor.dtype, tensor.shape), len(tensor.chunks), len(tensor.files), tensor.num_bytes


@lru_cache(maxsize=4096)
def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def total(checkpoint: Checkpoint) -> str:
    """Sum a checkpoint up in one line."""
    size = bytes_text(sum(one.num_bytes for one in checkpoint.tensors.values()))
    sizes = checkpoint.file_sizes
    missing = sum(found is None for found in sizes.values())
    lost = f", {missing:,} of them missing" if missing else ""
    objects = f", {counted(len(checkpoint.objects), 'other object')}" if checkpoint.objects else ""
    of = f"{len(checkpoint.tensors):,} of " if len(checkpoint.names) > len(checkpoint.tensors) else ""
    tensors = f"{of}{counted(len(checkpoint.names), 'tensor')}"
    return f"{checkpoint.kind}: {tensors} of {size} in {counted(len(sizes), 'file')}{lost}{objects}"


def tensor_lines(tensor: StoredTensor, *, all_chunks: bool = False) -> list[Text]:
    """Return which bytes of which file hold which part of a tensor."""
    kind, chunks, files, size = facts_of(tensor)
    head = f"  {kind}  {bytes_text(size)} in {counted(chunks, 'chunk')} of {counted(files, 'file')}"
    shown = tensor.chunks if all_chunks else tensor.chunks[:MOST_CHUNKS]
    sizes = {file: file_size(tensor.folder / file) for file in {chunk.place.file for chunk in shown if chunk.place}}
    rows = [("part", "file", "bytes"), *((str(chunk.region), *_place(chunk, sizes)) for chunk in shown)]
    more = len(tensor.chunks) - len(shown)
    rest = [line((f"{more:,} more: --all shows them", DIM))] if more else []
    return [line((printable(tensor.name), "bold"), head), *table(rows, left=2), *rest]


def _place(chunk: Chunk, sizes: Mapping[str, int | None]) -> tuple[str, str]:
    place = chunk.place
    if place is None:
        return "nowhere", ""
    size, end = sizes[place.file], place.start + place.size
    lost = ", which is missing" if size is None else f", which ends at {size:,}" if end > size else ""
    return f"{printable(place.file)}{lost}", f"{place.start:,} to {end:,}"


def checkpoint_report_lines(checkpoint: Checkpoint, report: Report, terminal: Terminal) -> list[Text]:
    """Return the findings, what was not checked, and the verdict."""
    found, unchecked = findings_lines(report.findings, terminal), not_checked_lines(report, terminal)
    return [
        *([*found, line("")] if found else []),
        *([*unchecked, line("")] if unchecked else []),
        _verdict(checkpoint, report, terminal),
    ]


def comparison_lines(comparison: Comparison, terminal: Terminal) -> list[Text]:
    """Return the tensors that aren't equal, grouped by their words, then notes and the verdict."""
    lines: list[Text] = []
    if comparison.map:
        lines.append(line("tensors matched by their values; --save-map FILE keeps this map:"))
        lines += [line(f"  {printable(one)}") for one in comparison.map]
    groups: list[Text] = []
    for _, alike in groupby(group_outcomes(comparison), key=lambda group: (group[0].cause, group[0].fix)):
        for number, group in enumerate(alike):
            groups += _group_lines(group, terminal, is_as_above=number > 0)
    lines += [*([line("")] if lines and groups else []), *groups]
    for note in comparison.notes:
        lines += wrapped(printable(note), terminal.width, line((f"{terminal.glyphs.unknown} ", DIM)), 4)
    return [*lines, *([line("")] if lines else []), *_summary_lines(comparison, terminal)]


def group_outcomes(comparison: Comparison) -> list[list[Outcome]]:
    """Group the tensors that aren't equal by what happened to them, whatever their numbers."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in comparison.outcomes:
        if outcome.verdict != "equal":
            why = (
                _DIGITS.sub("#", outcome.why)
                if outcome.verdict == "other"
                else relative_numbers(why_text(outcome), outcome.name)
            )
            apart = outcome.distance if outcome.verdict == "other" else None
            kind = "" if apart is None else "unrelated" if apart.is_unrelated else "near"
            groups.setdefault((outcome.verdict, why, outcome.cause, outcome.fix, kind), []).append(outcome)
    return list(groups.values())


def _group_lines(group: list[Outcome], terminal: Terminal, *, is_as_above: bool) -> list[Text]:
    first = min(group, key=lambda one: natural_key(one.name))
    good = first.verdict in ("tied", "not-compared")
    glyph = terminal.glyphs.unknown if good else terminal.glyphs.differs
    head = line((f"{glyph} {first.verdict}  ", WARNING if good else BAD))
    names = folded_names(sorted((one.name for one in group), key=natural_key), MOST_NAMES)
    lines = wrapped(printable(names), terminal.width, head, 2)
    lines += wrapped(printable(f"{why_all(first, group)}{_distance_text(group)}"), terminal.width, line("  "), 2)
    advice = (("cause", "as above"),) if is_as_above and first.cause else (("cause", first.cause), ("fix", first.fix))
    for word, text in advice:
        lines += wrapped(printable(text), terminal.width, line(f"  {word:<5}  "), 9) if text else []
    return lines


def _distance_text(group: list[Outcome]) -> str:
    """Say how far the values of a group are apart; empty if that is not known, or the values are another tensor's."""
    distances = [one.distance for one in group if one.distance is not None and one.verdict == "other"]
    if not distances:
        return ""
    if distances[0].is_unrelated:
        most = max(abs(one.correlation or 0) for one in distances)
        guess = "" if group[0].cause else ": drawn anew, never loaded, or another tensor's"
        return f"; the values are unrelated (correlation up to {most:.2f}){guess}"
    norms = sorted(one.norm for one in distances)
    sizes = dict.fromkeys(map(_percent, (norms[0], norms[-1])))
    return f"; the difference is {' to '.join(sizes)} of the first's norm"


def _percent(norm: float) -> str:
    return f"{norm:,.0f} times" if norm >= 10 else f"{100 * norm:.0f}%" if norm >= 0.01 else f"{100 * norm:.2g}%"


def why_all(first: Outcome, group: list[Outcome]) -> str:
    """Return what became of all of a group."""
    whys = {why_text(one) for one in group}
    if len(whys) == 1:
        return whys.pop()
    return (
        f"{first.name}: {first.why}; likewise the others"
        if first.verdict == "other"
        else relative_numbers(why_text(first), first.name)
    )


def relative_numbers(why: str, name: str) -> str:
    """Return words with names counted from a tensor's own name: their numbers, and all before the last dot.

    Example:
        >>> relative_numbers("the second has here the first's layers.3.w", "layers.4.w")
        "the second has here the first's layers.(*-1).w"
        >>> relative_numbers("the second has here the first's up.w.exp_avg_sq", "up.w.exp_avg")
        "the second has here the first's *.exp_avg_sq"
    """
    own = [int(number) for number in _OF_NAMES.findall(name)]
    beside = re.compile(rf"(?<!\S){re.escape(starred(name).rpartition('.')[0])}(?=\.[^.\s]+(\s|$))")
    return beside.sub("*", " ".join(_relative(word, own) for word in why.split(" ")))


def _relative(word: str, name_numbers: list[int]) -> str:
    if len(_OF_NAMES.findall(word)) != len(name_numbers):
        return word
    numbers = iter(name_numbers)

    def turned(match: re.Match[str]) -> str:
        by = int(match[0]) - next(numbers)
        return f"(*{by:+d})" if by else "*"

    return _OF_NAMES.sub(turned, word)


def why_text(outcome: Outcome) -> str:
    """Say what happened to a tensor, with its other name unless only the prefix differs."""
    is_said = (
        outcome.verdict in ("moved", "renamed", "tied", "cast")
        or outcome.name.endswith(outcome.other)
        or outcome.other.endswith(outcome.name)
    )
    return outcome.why if is_said or "(" in outcome.other else f"as {starred(outcome.other)}: {outcome.why}"


def _summary_lines(comparison: Comparison, terminal: Terminal) -> list[Text]:
    """Return the verdict; equality under a map that was inferred from the values says so."""
    if comparison.differs:
        return [line((f"{terminal.glyphs.differs} {counts_text(comparison)}", BAD))]
    if comparison.counts["not-compared"]:
        return [line((f"{terminal.glyphs.unknown} {counts_text(comparison)}", WARNING))]
    glyph, style = (terminal.glyphs.unknown, WARNING) if comparison.guessed else (terminal.glyphs.good, GOOD)
    text = f"{glyph} {counted(comparison.compared, 'tensor')} compared, all equal"
    if not comparison.map and not comparison.guessed:
        return [line((text, style))]
    check = f"{listed(comparison.guessed, MOST_NAMES)} in it" if comparison.guessed else "its names"
    doubt = f"under a map that the values suggest: check {check}, or compare by your own with --map FILE"
    return wrapped(doubt, terminal.width, line((f"{text} ", style)), 2)


def _verdict(checkpoint: Checkpoint, report: Report, terminal: Terminal) -> Text:
    tensors = counted(report.num_tensors, "tensor")
    files = counted(len(checkpoint.file_sizes), "file")
    if report.findings:
        names = {name for name in report.findings_of if name}
        where = f" in {len(names):,} of {tensors}" if names else f" in {tensors}"
        text = f"{counted(len(report.findings), 'finding')}{where}, {files}"
        return line((f"{terminal.glyphs.error} {text}", BAD))
    if not report.num_tensors:
        return line((f"{terminal.glyphs.unknown} no file has a tensor", WARNING))
    names = {one.tensor for one in report.not_checked if one.tensor}
    but = f"; {listed(map(printable, sorted(names)))} not checked" if names else ""
    glyph, style = (terminal.glyphs.unknown, WARNING) if names else (terminal.glyphs.good, GOOD)
    have = "file has one rank's parts of" if checkpoint.ranks else "files have all of"
    text = f"{glyph} the {have} {tensors}, in {files}{but}"
    return line((text, style), ("; contents are compared by `shardviz diff`", DIM))
