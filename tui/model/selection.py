"""The selection that all views share, the messages that change it, and targets read from a short text."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from textual.message import Message

from shardviz.errors import ShardvizError
from shardviz.layout.region import index_of
from shardviz.picture.model.drawing import drawn_dims
from shardviz.picture.model.holders import Plane
from shardviz.picture.model.sides import first_difference
from shardviz.picture.model.subject import IN_PLACE, OF_PLACES
from shardviz.text import counted, nearest, printable

from .names import fitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.picture.text.paint import Side

    from .document import Document
    from .stored import StoredDocument
    from .tree import Entry

    AnyDocument: TypeAlias = Document | StoredDocument


Opened = TypeVar("Opened", bound="AnyDocument")
"""A dump or a checkpoint."""

Place = tuple[int, ...]

_RANK = re.compile(r"r(?:ank)?\s*(\d{1,9})", re.IGNORECASE)
_FLAT = re.compile(r"#\s*(\d{1,18})")
_NUMBERS = re.compile(r"\[?\s*-?\d{1,18}(?:\s*[,\s]\s*-?\d{1,18})*\s*,?\s*\]?")
_IN_TENSOR = re.compile(r"(.*[^.\s])\s*(\[[-\d\s,]*\]|#\s*\d+)")
_COORD = re.compile(r"([A-Za-z_]\w*)\s*=\s*(\d{1,9})")


@dataclass(frozen=True)
class Target:
    """Where to go; what is None stays as it is.

    Attributes:
        place: The element's index.
        others: How many other tensors the text fits.
    """

    entry: int | None = None
    name: str = ""
    place: Place | None = None
    rank: int | None = None
    others: int = 0


def how_to_ask(document: AnyDocument) -> str:
    """Return what can be asked for, in a line."""
    mesh = document.mesh
    ranks = f"rank {mesh.ranks[-1]} · {mesh.label(mesh.ranks[-1]).replace(',', '')} · " if mesh is not None else ""
    return f"{ranks}a name · 6, 0 or #72 · name[6, 0]"


def parse_target(text: str, document: AnyDocument, entry: int = 0, name: str = "") -> Target | str:
    """Read where to go, from an entry and one of its names.

    Returns:
        Where to go, or one line that says why the text is not a place.
    """
    text = text.strip()
    if not text:
        return how_to_ask(document)
    entries: Sequence[Entry] = document.entries
    for index, known in enumerate(entries):
        if text in known.names:
            return Target(index, text)
    if (rank := _rank(text, document, entry)) is not None:
        return rank
    if _FLAT.fullmatch(text) or _NUMBERS.fullmatch(text):
        return _element(text, document, Target(entry, name))
    if (inside := _IN_TENSOR.fullmatch(text)) and isinstance(tensor := _tensor(inside[1], document), Target):
        return _element(inside[2], document, tensor)
    return _tensor(text, document)


def _rank(text: str, document: AnyDocument, entry: int) -> Target | str | None:
    """Read a rank, or its coordinates; None if it is neither. A single number is a rank unless it is an index."""
    mesh, match = document.mesh, _RANK.fullmatch(text)
    if mesh is None:
        return "a checkpoint has no ranks" if match else None
    entries = document.entries
    if match is None and text.isdigit() and (not entries or len(entries[entry].tensor.shape) != 1):
        match = re.fullmatch(r"(\d{1,9})", text)
    if match is not None:
        rank = int(match[1])
        return Target(rank=rank) if rank in mesh else f"there is no rank {rank}: the mesh is {mesh}"
    coord = {axis: int(position) for axis, position in _COORD.findall(text)}
    if not coord or _COORD.sub("", text).strip(" ,()"):
        return None
    for axis, position in coord.items():
        if axis not in mesh.axes:
            return f"there is no axis {axis}: the mesh is {mesh}"
        if position >= mesh.shape[mesh.axes.index(axis)]:
            return f"{axis}={position} is not on the mesh {mesh}"
    return Target(rank=mesh.rank_at(tuple(coord.get(axis, 0) for axis in mesh.axes)))


def _tensor(text: str, document: AnyDocument) -> Target | str:
    """Find a tensor by its name, the end of it, its module, or a part of it; the first of several in model order."""
    lower, fits = text.lower(), []
    entries: Sequence[Entry] = document.entries
    for index, entry in enumerate(entries):
        for name in entry.names:
            if f".{text}." in f".{name}":
                fits.append((0, index, name))
            elif name.endswith(f".{text}"):
                fits.append((1, index, name))
            elif lower in printable(name).lower():
                fits.append((2, index, name))
    if fits:
        _, index, name = min(fits, key=lambda fit: fit[0])
        return Target(index, name, others=len(fits) - 1)
    close = nearest(text, [name for entry in entries for name in entry.names])
    meant = f"; did you mean {printable(close)}?" if close else ""
    return f"no tensor has {printable(text)} in its name{meant}"


def _element(text: str, document: AnyDocument, target: Target) -> Target | str:
    """Add an element, given by its index or by its number, to a tensor."""
    if not document.entries or target.entry is None:
        return "there are no tensors"
    place = parse_place(text, document.entries[target.entry].tensor.shape)
    return place if isinstance(place, str) else replace(target, place=place)


def parse_place(text: str, shape: Sequence[int]) -> Place | str:
    """Read `3, 5` (an index) or `#42` (an element counted row by row from 0).

    Returns:
        The index, or one line that says why the text is not an element.
    """
    flat, numbers = _FLAT.fullmatch(text.strip()), re.findall(r"-?\d{1,18}", text)
    if flat is None and (len(numbers) != len(shape) or re.sub(r"[-\d\s,\[\]]", "", text)):
        return f"enter {counted(len(shape), 'number')} for shape {list(shape)}, or a number such as #42"
    if not all(shape):
        return f"shape {list(shape)} has no elements"
    if flat is not None:
        number, whole = int(flat[1]), math.prod(shape)
        return tuple(index_of(number, shape)) if number < whole else f"elements go from #0 to #{whole - 1:,}"
    index = tuple(
        int(number) + (size if number.startswith("-") else 0) for number, size in zip(numbers, shape, strict=True)
    )
    outside = [dim for dim, (at, size) in enumerate(zip(index, shape, strict=True)) if not 0 <= at < size]
    return f"dim {outside[0]} has indices 0 to {shape[outside[0]] - 1}" if outside else index


@dataclass
class TensorChosen(Message):
    """A tensor was chosen from the list: its entry and, if it is identical layers, which of its names."""

    entry: int
    name: str = ""


class TensorOpened(Message):
    """The user asked for the map of the chosen tensor."""


@dataclass
class Picked(Message):
    """A rank, a side, a plane or an element on it was chosen; what is None stays."""

    rank: int | None = None
    side: Side | None = None
    plane: Plane | None = None


@dataclass
class Zoomed(Message):
    """A map was zoomed to a level."""

    level: int


@dataclass(frozen=True)
class Selection:
    """The user's choices.

    Attributes:
        entry: Index of the tensor among the document's entries.
        side: Which description of it is drawn.
        plane: The dims drawn, and the place of the cursor; None for a tensor without elements.
        rank: The chosen rank; None until one is chosen.
        finding: Index of the chosen finding.
        name: Which of the tensor's names, if it is identical layers; empty for the first.
    """

    entry: int = 0
    side: Side = "claimed"
    plane: Plane | None = None
    rank: int | None = None
    finding: int = 0
    name: str = ""


def first_selection(document: AnyDocument) -> Selection:
    """Return the selection that a document opens with: its first finding, or its first tensor."""
    if document.by_finding:
        return of_finding(document, Selection(), min(document.by_finding))
    return of_entry(document, Selection(), 0) if document.entries else Selection()


def name_of(document: AnyDocument, selection: Selection) -> str:
    """Return the name of the chosen tensor, of identical layers the chosen one's; empty if there are no tensors."""
    if not document.entries:
        return ""
    names = document.entries[selection.entry].names
    return selection.name if selection.name in names else names[0]


def of_entry(document: AnyDocument, selection: Selection, entry: int, name: str = "") -> Selection:
    """Return the selection with another tensor: its first finding, the most useful side, its first element."""
    tensor_entry = document.entries[entry]
    shape = (1,) * (2 - len(tensor_entry.tensor.shape)) + tuple(tensor_entry.tensor.shape)
    plane = Plane(*_first_dims(document, entry), (0,) * len(shape)) if all(shape) else None
    finding = tensor_entry.findings[0] if tensor_entry.findings else selection.finding
    kinds = [document.findings[index].kind for index in tensor_entry.findings]
    differs = any(kind in OF_PLACES or kind in IN_PLACE for kind in kinds)
    side: Side = "difference" if differs else "claimed" if selection.side == "difference" else selection.side
    if not tensor_entry.has_claim and not differs:
        side = "held"
    return replace(selection, entry=entry, plane=plane, finding=finding, side=side, name=name)


def _first_dims(document: AnyDocument, entry: int) -> tuple[int, int]:
    """Return the dims that a tensor opens on: a line downwards, and of more than two dims those that are split."""
    ndim = len(document.entries[entry].tensor.shape)
    if ndim > 2:
        with suppress(ShardvizError):
            holders = document.sides(entry).holders
            return drawn_dims([len(holders.edges(dim)) - 1 for dim in range(ndim)])
    return (ndim - 2, ndim - 1) if ndim > 1 else (1, 0)


def of_finding(document: AnyDocument, selection: Selection, finding: int) -> Selection:
    """Return the selection with a finding, its tensor, and the first element of it that is misplaced."""
    if finding not in document.by_finding:
        return replace(selection, finding=finding)
    entry = document.by_finding[finding]
    tensors, ranks = document.findings[finding].tensors, document.findings[finding].ranks
    name = next((name for name in document.entries[entry].names if name in tensors), "")
    selection = of_entry(document, selection, entry, name)
    plane = selection.plane
    with suppress(ShardvizError):
        if plane is not None and (place := first_difference(document.sides(entry), plane)):
            plane = replace(plane, at=place)
    return replace(selection, finding=finding, rank=ranks[0] if ranks else selection.rank, plane=plane)


def next_finding(document: AnyDocument, selection: Selection, step: int) -> Selection:
    """Return the selection with the finding `step` further on, round and round; another tensor's comes first."""
    step = step if document.is_about(selection.finding, selection.entry) else 0
    return of_finding(document, selection, (selection.finding + step) % len(document.findings))


def carried_over(before: AnyDocument, after: AnyDocument, selection: Selection) -> Selection:
    """Return the selection after a document was checked or read again: the same tensor and place if it has them."""
    selection = _of_same_tensor(before, after, selection)
    return selection if selection.finding < len(after.findings) else replace(selection, finding=0)


def _of_same_tensor(before: AnyDocument, after: AnyDocument, selection: Selection) -> Selection:
    name = name_of(before, selection)
    entries: Sequence[Entry] = after.entries
    for index, entry in enumerate(entries):
        if name and name in entry.names and entry.role == before.entries[selection.entry].role:
            if entry.tensor.shape == before.entries[selection.entry].tensor.shape:
                return replace(selection, entry=index)
            moved = of_entry(after, selection, index, selection.name)
            return replace(moved, side=selection.side)
    return first_selection(after)


def rank_of(document: Document, selection: Selection, among: Sequence[int] = ()) -> int:
    """Return the chosen rank; until one is chosen, the first of `among`, or of the mesh."""
    if selection.rank is not None:
        return selection.rank
    return among[0] if among else document.mesh.ranks[0]


def next_plane(plane: Plane) -> Plane:
    """Return the plane of the next pair of dims; after the last pair comes the first."""
    pairs = list(combinations(range(len(plane.at)), 2))
    rows, cols = pairs[(pairs.index((plane.rows, plane.cols)) + 1) % len(pairs)]
    return replace(plane, rows=rows, cols=cols)


def next_slice(plane: Plane, shape: Sequence[int], step: int) -> tuple[int, ...] | None:
    """Return the cursor's place `step` slices on, the last of the dims not drawn fastest; None past the ends."""
    place, left = list(plane.at), step
    for dim in reversed([dim for dim in range(len(place)) if dim not in (plane.rows, plane.cols)]):
        left, place[dim] = divmod(place[dim] + left, shape[dim])
    return None if left else tuple(place)


def opened_on(document: AnyDocument, tensor: str | None, rank: int | None) -> Selection:
    """Return the selection that a document opens with: a tensor and a rank that are asked for, or its first finding.

    Raises:
        ShardvizError: It has no such tensor; one that is only read in part may have it still.
    """
    selection = first_selection(document)
    if tensor is not None:
        try:
            name = document.find(tensor)
        except ShardvizError:
            if not document.is_partial:
                raise
        else:
            entries: Sequence[Entry] = document.entries
            entry = next((index for index, known in enumerate(entries) if name in known.names), None)
            selection = at_target(document, selection, Target(entry, name))
    return selection if rank is None else replace(selection, rank=rank)


def at_target(document: AnyDocument, selection: Selection, target: Target) -> Selection:
    """Return the selection with what a target names; all else stays."""
    if target.rank is not None:
        return replace(selection, rank=target.rank)
    if target.entry is None:
        return selection
    if target.entry != selection.entry:
        selection = of_entry(document, selection, target.entry, target.name)
    selection = replace(selection, name=target.name)
    if target.place is None or selection.plane is None:
        return selection
    missing = len(selection.plane.at) - len(target.place)
    return replace(selection, plane=replace(selection.plane, at=(*(0,) * missing, *target.place)))


def about(document: AnyDocument, target: Target) -> str:
    """Say which rank, tensor or element a target is; of an element, who should hold it and who does."""
    if target.rank is not None and document.mesh is not None:
        lost = "\n? the dump has no readable file for it" if target.rank in document.missing else ""
        return f"rank {target.rank}: {document.mesh.label(target.rank)}{lost}"
    if target.entry is None:
        return ""
    title = f"{fitted(printable(target.name))}  {document.entries[target.entry].layout}"
    if target.place is None:
        others = f"\nand {counted(target.others, 'more tensor')} with this in the name" if target.others else ""
        return title + others
    try:
        who = document.who(target.entry, target.place, target.name)
    except ShardvizError as error:
        who = [f"? {printable(error.message)}"]
    return "\n".join([f"{list(target.place)} of {title}", *who])
