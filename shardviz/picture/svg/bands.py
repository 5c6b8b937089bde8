"""Bands between the two sides of a panel: from where each part should be to where it is."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from shardviz.picture.markup import element
from shardviz.picture.model.holders import ranks_of
from shardviz.picture.model.pieces import pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.picture.model.drawing import Panel
    from shardviz.picture.model.nest import Span
    from shardviz.picture.model.palette import Colouring
    from shardviz.picture.model.pieces import Stretch
    from shardviz.picture.svg.map import Scale


def bands(panel: Panel, scale: Scale, colouring: Colouring, width: int) -> str:
    """Draw a band from every piece as it is claimed to where it is held, `width` pixels wide; those that stay first."""
    drawn = []
    for mask, due, has in pieces(panel):
        colour = f"sv-band sv-f{colouring.colour(ranks_of(mask)[0])}"
        path = _band(panel.rows, scale, due, has, width)
        drawn.append((due != has, element("path", d=path, class_=colour if due != has else f"{colour} sv-still")))
    return "".join(path for _, path in sorted(drawn, key=lambda pair: pair[0]))


def has_bands(panel: Panel) -> bool:
    """Whether bands say where parts went: parts are stretches of one dim, and not too many."""
    return bool(pieces(panel))


def _band(rows: Sequence[Span], scale: Scale, due: Stretch, has: Stretch, width: int) -> str:
    (top, bottom), (to_top, to_bottom) = (
        (_pixel(rows, scale, low) + 1, _pixel(rows, scale, high) - 1) for low, high in (due, has)
    )
    bend = width // 2
    there = f"M0 {top}C{bend} {top} {bend} {to_top} {width} {to_top}"
    return f"{there}V{to_bottom}C{bend} {to_bottom} {bend} {bottom} 0 {bottom}Z"


def _pixel(rows: Sequence[Span], scale: Scale, index: float) -> int:
    """Return where an index is downwards."""
    row = max(bisect_right([span.start for span in rows], index) - 1, 0)
    share = min((index - rows[row].start) / len(rows[row]), 1)
    return round(scale.tops[row] + share * (scale.tops[row + 1] - scale.tops[row]))
