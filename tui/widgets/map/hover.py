"""What the mouse asks of a map: the element under it, and who should hold it and does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.model.holders import ranks_text
from shardviz.picture.model.palette import WRONG
from shardviz.text import cut_at_comma

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.picture.model.holders import Mask
    from shardviz.picture.model.sides import Sides

MOST_RANKS = 40
"""Characters of the ranks in a tooltip."""


def hovered(sides: Sides, place: Sequence[int], shape: Sequence[int]) -> str:
    """Say in a few words who holds an element.

    Args:
        sides: Who holds what.
        place: The element's index in the holders' shape.
        shape: The tensor's shape, which may have fewer dims.
    """
    cell = sides.at(place)
    lines = [f"[{', '.join(map(str, place[len(place) - len(shape) :]))}]"]
    if sides.has_claimed:
        lines.append(f"{sides.titles[0]} {_who(cell.claimed)}")
    if sides.has_held:
        lines.append(f"{sides.titles[1]} {_who(cell.held)}{f' {WRONG}' if cell.is_wrong else ''}")
    return "\n".join(lines)


def _who(mask: Mask) -> str:
    return f"by {cut_at_comma(ranks_text(mask), MOST_RANKS)}" if mask else "by nobody"
