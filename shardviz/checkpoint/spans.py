"""The bytes of safetensors files: each is one tensor's; where two share some, or none has them, libraries refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.explain.files import DamagedHeader
from shardviz.layout.dtypes import itemsize
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.checkpoint.records import Checkpoint
    from shardviz.explain.finding import Finding

    Span = tuple[int, int, str]

MAX_NAMES = 3


def check_spans(checkpoint: Checkpoint) -> Iterator[Finding | NotChecked]:
    """Yield bytes that several tensors claim, bytes that none does, and dtypes that nobody knows."""
    if checkpoint.kind != "safetensors":
        return
    for file, spans in _spans(checkpoint).items():
        yield from _overlaps(file, spans)
        yield from _unused(file, spans, checkpoint.file_sizes.get(file))
    strange = [name for name, one in checkpoint.tensors.items() if not itemsize(one.dtype)]
    if strange:
        types = listed(sorted({checkpoint.tensors[name].dtype for name in strange}), MAX_NAMES)
        why = f"whether the bytes of {counted(len(strange), 'tensor')} fit: dtype {types} is not known here"
        yield NotChecked(strange[0] if len(strange) == 1 else "", why, "run")


def _spans(checkpoint: Checkpoint) -> dict[str, list[Span]]:
    """Return which bytes of each file are which tensor's, in order."""
    found: dict[str, list[Span]] = {}
    for name, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.place is not None and chunk.place.size:
                place = chunk.place
                found.setdefault(place.file, []).append((place.start, place.start + place.size, name))
    return {file: sorted(spans) for file, spans in found.items()}


def _overlaps(file: str, spans: list[Span]) -> Iterator[Finding]:
    """Yield each tensor that shares bytes with one before it."""
    end, owner = 0, ""
    for start, stop, name in spans:
        if start < end:
            text = f"bytes {start:,} to {min(end, stop):,} of {printable(file)} are {printable(owner)}'s too"
            yield DamagedHeader().finding(name, (), text, kind="duplicated")
        if stop > end:
            end, owner = stop, name


def _unused(file: str, spans: list[Span], size: int | None) -> Iterator[Finding]:
    """Yield that a file has bytes between or behind its tensors that are none's."""
    ends = [spans[0][0]]
    for _, stop, _ in spans:
        ends.append(max(ends[-1], stop))
    holes = [(end, start) for end, (start, _, _) in zip(ends, spans, strict=False) if start > end]
    if size is not None and size > ends[-1]:
        holes.append((ends[-1], size))
    if holes:
        lost = sum(stop - start for start, stop in holes)
        text = f"{lost:,} bytes of {printable(file)} are of no tensor, the first at byte {holes[0][0]:,}"
        yield DamagedHeader().finding("", (), text, kind="incomplete")
