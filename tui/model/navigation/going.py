"""Going to a rank, a tensor or an element of a dump, and saying where that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.dump.find import find_tensors
from shardviz.errors import ShardvizError
from shardviz.text import counted, printable

from ..names import shortened
from ..rank.whereabouts import who_has
from .selection import first_selection, of_entry
from .target import Target

if TYPE_CHECKING:
    from ..document import Document
    from .selection import Selection


@dataclass(frozen=True)
class Link:
    """What a viewer was asked to open on.

    Attributes:
        tensor: A tensor, as `shardviz show` finds it.
        rank: A rank.
    """

    tensor: str | None = None
    rank: int | None = None


def opened_on(document: Document, link: Link) -> Selection:
    """Return the selection that a document opens with: what a link names, or its first finding.

    Raises:
        ShardvizError: It has no such tensor; one that is only read in part may have it still.
    """
    selection = first_selection(document)
    if link.tensor is not None:
        try:
            name, _ = find_tensors(document.dump, link.tensor)[0]
        except ShardvizError:
            if not document.is_partial:
                raise
        else:
            found = (index for index, entry in enumerate(document.entries) if name in entry.names)
            selection = at_target(document, selection, Target(next(found, None), name))
    return selection if link.rank is None else replace(selection, rank=link.rank)


def at_target(document: Document, selection: Selection, target: Target) -> Selection:
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


def about(document: Document, target: Target) -> str:
    """Say which rank, tensor or element a target is; of an element, who should hold it and who does."""
    if target.rank is not None:
        mesh = document.dump.files.mesh
        lost = "\n? the dump has no readable file for it" if target.rank in document.missing else ""
        return f"rank {target.rank}: {mesh.label(target.rank)}{lost}"
    if target.entry is None:
        return ""
    entry = document.entries[target.entry]
    title = f"{shortened(printable(target.name))}  {entry.layout}"
    others = f"\nand {counted(target.others, 'more tensor')} with this in the name" if target.others else ""
    if target.place is None:
        return title + others
    return "\n".join([f"{list(target.place)} of {title}", *_who(document, target)])


def _who(document: Document, target: Target) -> list[str]:
    assert target.entry is not None
    assert target.place is not None
    tensor = document.entries[target.entry].tensor
    try:
        sides = document.sides(target.entry, target.name)
        return who_has(document.dump, tensor, sides, target.place, target.name)
    except ShardvizError as error:
        return [f"? {printable(error.message)}"]
