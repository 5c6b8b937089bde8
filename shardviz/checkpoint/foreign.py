"""Files of another save: longer than the metadata says, and with nothing where it says that something is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.formats.pickled import UnknownTypeError
from shardviz.errors import DumpError
from shardviz.explain.files import ForeignFile
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.checkpoint.records import Checkpoint, Chunk, Place, Saved
    from shardviz.explain.finding import Finding

    Entries = dict[str, list[tuple[Saved, Chunk]]]

TRIED = 3
"""Parts of tensors in a file that are looked for."""


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
