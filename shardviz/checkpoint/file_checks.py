"""What is wrong with files: those of another save, and bytes that several tensors of safetensors claim, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.checkpoint.formats.pickled import UnknownTypeError
from shardviz.errors import DumpError
from shardviz.explain.files import DamagedHeader, ForeignFile
from shardviz.layout.dtypes import itemsize
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.checkpoint.records import Checkpoint, Chunk, Place, Saved
    from shardviz.explain.finding import Finding

    Entries = dict[str, list[tuple[Saved, Chunk]]]
    Span = tuple[int, int, str]

TRIED = 3
"""Parts of tensors in a file that are looked for."""

MAX_NAMES = 3


def foreign_files(checkpoint: Checkpoint) -> dict[str, Finding]:
    """Return the files of a DCP folder that are not those that its metadata describes."""
    entries: Entries = {}
    ends: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        for chunk in tensor.chunks:
            if chunk.place is not None and chunk.place.archive and not chunk.place.transformed:
                entries.setdefault(chunk.place.file, []).append((tensor, chunk))
    for place in (*_places(entries), *checkpoint.objects.values()):
        ends[place.file] = max(ends.get(place.file, 0), place.start + place.size)
    sizes = checkpoint.file_sizes
    long = [file for file in entries if (size := sizes[file]) is not None and size > ends[file]]
    return {
        file: _finding(file, sizes[file] or 0, ends[file], entries[file]) for file in long if _is_odd(entries[file])
    }


def _places(entries: Entries) -> Iterator[Place]:
    return (chunk.place for own in entries.values() for _, chunk in own if chunk.place is not None)


def _is_odd(entries: list[tuple[Saved, Chunk]]) -> bool:
    """Whether none of a file's first entries can be read."""
    return not any(_is_readable(tensor, chunk) for tensor, chunk in entries[:TRIED])


def _is_readable(tensor: Saved, chunk: Chunk) -> bool:
    try:
        tensor.stored(chunk)
    except UnknownTypeError:
        return True
    except DumpError:
        return False
    return True


def _finding(file: str, size: int, end: int, entries: list[tuple[Saved, Chunk]]) -> Finding:
    few = min(len(entries), TRIED)
    text = (
        f"{printable(file)} has {size:,} bytes, the metadata describes {end:,} of them, and nothing is where it says: "
    )
    text += f"{few} of its {counted(len(entries), 'part')} of tensors were tried"
    finding = ForeignFile(printable(file)).finding("", (), text)
    return of_tensors(finding, dict.fromkeys(tensor.name for tensor, _ in entries))


def of_tensors(finding: Finding, names: Iterable[str]) -> Finding:
    """Return a file's finding as that of the tensors with a part in it."""
    return replace(finding, members=tuple(replace(finding, tensor=name) for name in names))


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
    spans_of: dict[str, list[Span]] = {}
    for name, tensor in checkpoint.tensors.items():
        for chunk in tensor.chunks:
            if chunk.place is not None and chunk.place.size:
                place = chunk.place
                spans_of.setdefault(place.file, []).append((place.start, place.start + place.size, name))
    return {file: sorted(spans) for file, spans in spans_of.items()}


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
