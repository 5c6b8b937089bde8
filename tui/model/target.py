"""Where a user wants to go: a rank, a tensor, an element, read from a short text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.text import counted, nearest, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.layout.mesh import Mesh

    from .filters import Entry


Place = tuple[int, ...]

HOW = "rank 3 · fsdp=0 tp=1 · a name · 6, 0 or #72 · name[6, 0]"
"""What can be asked for, in a line."""

_RANK = re.compile(r"r(?:ank)?\s*(\d{1,9})", re.IGNORECASE)
_FLAT = re.compile(r"#\s*(\d{1,18})")
_NUMBERS = re.compile(r"\[?\s*-?\d{1,18}(?:\s*[,\s]\s*-?\d{1,18})*\s*,?\s*\]?")
_IN_TENSOR = re.compile(r"(.*[^.\s])\s*(\[[-\d\s,]*\]|#\s*\d+)")
_COORD = re.compile(r"([A-Za-z_]\w*)\s*=\s*(\d{1,9})")


@dataclass(frozen=True)
class Known:
    """What can be gone to.

    Attributes:
        entries: The tensors.
        shape_of: The shape of an entry.
        entry: The entry that is chosen now.
        name: Its name.
        mesh: The mesh of the ranks; None if there are none.
    """

    entries: Sequence[Entry]
    shape_of: Callable[[int], tuple[int, ...]]
    entry: int = 0
    name: str = ""
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Target:
    """Where to go; what is None stays as it is.

    Attributes:
        entry: The tensor's entry.
        name: The tensor's name.
        place: The element's index.
        rank: The rank.
        others: How many other tensors the text fits.
    """

    entry: int | None = None
    name: str = ""
    place: Place | None = None
    rank: int | None = None
    others: int = 0


def parse_target(text: str, known: Known) -> Target | str:
    """Read where to go.

    Returns:
        Where to go, or one line that says why the text is not a place.
    """
    text = text.strip()
    if not text:
        return HOW
    for index, entry in enumerate(known.entries):
        if text in entry.names:
            return Target(index, text)
    if (rank := _rank(text, known)) is not None:
        return rank
    if _FLAT.fullmatch(text) or _NUMBERS.fullmatch(text):
        return _element(text, known, Target(known.entry, known.name))
    if (inside := _IN_TENSOR.fullmatch(text)) and isinstance(tensor := _tensor(inside[1], known), Target):
        return _element(inside[2], known, tensor)
    return _tensor(text, known)


def _rank(text: str, known: Known) -> Target | str | None:
    """Read a rank, or its coordinates; None if it is neither. A single number is a rank unless it is an index."""
    mesh, match = known.mesh, _RANK.fullmatch(text)
    if mesh is None:
        return "a checkpoint has no ranks" if match else None
    if match is None and text.isdigit() and (not known.entries or len(known.shape_of(known.entry)) != 1):
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


def _tensor(text: str, known: Known) -> Target | str:
    """Find a tensor by its name, the end of it, its module, or a part of it; the first of several in model order."""
    lower, fits = text.lower(), []
    for index, entry in enumerate(known.entries):
        for name in entry.names:
            if name == text:
                return Target(index, name)
            if f".{text}." in f".{name}":
                fits.append((0, index, name))
            elif name.endswith(f".{text}"):
                fits.append((1, index, name))
            elif lower in printable(name).lower():
                fits.append((2, index, name))
    if fits:
        _, index, name = min(fits, key=lambda fit: fit[0])
        return Target(index, name, others=len(fits) - 1)
    close = nearest(text, [name for entry in known.entries for name in entry.names])
    meant = f"; did you mean {printable(close)}?" if close else ""
    return f"no tensor has {printable(text)} in its name{meant}"


def _element(text: str, known: Known, target: Target) -> Target | str:
    """Add an element, given by its index or by its number, to a tensor."""
    if not known.entries or target.entry is None:
        return "there are no tensors"
    place = parse_place(text, known.shape_of(target.entry))
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
        number = int(flat[1])
        whole = math.prod(shape)
        return tuple(index_of(number, shape)) if number < whole else f"elements go from #0 to #{whole - 1:,}"
    index = tuple(
        int(number) + (size if number.startswith("-") else 0) for number, size in zip(numbers, shape, strict=True)
    )
    outside = [dim for dim, (at, size) in enumerate(zip(index, shape, strict=True)) if not 0 <= at < size]
    return f"dim {outside[0]} has indices 0 to {shape[outside[0]] - 1}" if outside else index


def index_of(number: int, shape: Sequence[int]) -> list[int]:
    """Return the index of an element that is counted row by row."""
    index: list[int] = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.insert(0, at)
    return index
