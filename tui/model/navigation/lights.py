"""Which ranks of the mesh are marked for the selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.picture.model.holders import mask_of
from shardviz.picture.model.palette import WRONG

from ..step.text import group_of

if TYPE_CHECKING:
    from shardviz.picture.model.sides import Sides
    from shardviz.picture.text.paint import Side

    from ..document import Document
    from ..step.step import Collective
    from .selection import Selection


@dataclass(frozen=True)
class Lights:
    """The marks of ranks on the mesh.

    Attributes:
        claimed: The ranks that hold the element by the placements, as a mask.
        held: The ranks that hold it by the ids, as a mask; the same as `claimed` if there are no ids.
        missing: Ranks whose files are missing or damaged.
        group: Ranks that are underlined, as one group along an axis.
        guilty: Ranks that the chosen finding names.
    """

    claimed: int = 0
    held: int = 0
    missing: frozenset[int] = frozenset()
    group: frozenset[int] = frozenset()
    guilty: frozenset[int] = frozenset()

    def sign(self, rank: int) -> str:
        """Return the sign of a rank."""
        if rank in self.missing:
            return "?"
        claimed, held = self.claimed >> rank & 1, self.held >> rank & 1
        if rank in self.guilty and claimed == held:
            return WRONG
        return " +○●"[2 * claimed + held]


def drawn_side(sides: Sides, side: Side) -> Side:
    """Return the side to draw instead of one that is not known, on which nobody would seem to hold anything."""
    if sides.has_claimed == sides.has_held or sides.marks_each_side or not all(sides.holders.shape):
        return side
    return "held" if sides.has_held else "claimed"


def lights_of(document: Document, selection: Selection, rank: int | None = None, axis: str = "") -> Lights:
    """Mark the holders of the element under the map's cursor, and the group of a rank along an axis."""
    files = document.dump.files
    group: frozenset[int] = frozenset()
    if axis and rank is not None and rank in files.mesh:
        group = frozenset(files.mesh.group_of(rank, axis))
    missing = document.missing
    guilty = _guilty(document, selection)
    if selection.plane is None:
        return Lights(missing=missing, group=group, guilty=guilty)
    try:
        sides = document.sides(selection.entry, selection.name)
    except ShardvizError:
        return Lights(missing=missing, group=group, guilty=guilty)
    cell = sides.at(selection.plane.at)
    claimed = cell.claimed if sides.has_claimed else cell.held
    return Lights(claimed, cell.held if sides.has_held else claimed, missing, group, guilty)


def _guilty(document: Document, selection: Selection) -> frozenset[int]:
    """Return the ranks that the chosen finding names; none where it is about another tensor."""
    if not document.entries or selection.finding >= len(document.findings):
        return frozenset()
    finding = document.findings[selection.finding]
    is_of_this = not finding.tensor or selection.finding in document.entries[selection.entry].findings
    return frozenset(finding.ranks) if is_of_this else frozenset()


def takes_part(document: Document, collective: Collective, rank: int) -> Lights:
    """Mark the ranks that take part in a collective, and the group of one of them."""
    files, mask = document.dump.files, mask_of(collective.ranks)
    return Lights(mask, mask, document.missing, group_of(collective, files.mesh, rank))
