"""Pieces of a panel: from where each part should be to where it is. Bands connect them.

A rank's parts are matched in the order in which it holds them. A part that was cut has as many pieces, each as high as
it is on either side.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from shardviz.picture.model.holders import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.picture.model.drawing import Grid, Panel
    from shardviz.picture.model.nest import Span

MOST_PIECES = 64
"""With more than this nothing could be followed."""

Stretch = tuple[float, float]
"""The indices from which and up to which a part reaches."""

Piece = tuple[Mask, Stretch, Stretch]
"""Whose it is, where it is on the first side, and where on the second."""


def pieces(panel: Panel) -> list[Piece]:
    """Return a panel's pieces; none unless the parts are stretches of one dim, and not too many."""
    if not panel.is_different or len(panel.cols) > 1 or panel.claimed is None or panel.held is None:
        return []
    found = list(_pieces(panel, panel.claimed, panel.held))
    return found if 1 < len(found) <= MOST_PIECES else []


def _pieces(panel: Panel, claimed: Grid, held: Grid) -> Iterator[Piece]:
    """Yield the pieces of each set of ranks; if parts are left out, only of equally large parts."""
    due, has = _stretches(panel.rows, claimed), _stretches(panel.rows, held)
    is_whole = all(span.parts == 1 for span in panel.rows)
    for mask in due:
        if mask in has and (is_whole or _are_of_one_size(due[mask], has[mask])):
            cuts = sorted({*_shares(due[mask]), *_shares(has[mask])})
            for start, stop in pairwise(cuts):
                yield mask, _range_between(due[mask], start, stop), _range_between(has[mask], start, stop)


def _are_of_one_size(due: Sequence[Stretch], has: Sequence[Stretch]) -> bool:
    return len(due) == len(has) == 1 and due[0][1] - due[0][0] == has[0][1] - has[0][0]


def _stretches(rows: Sequence[Span], grid: Grid) -> dict[Mask, list[Stretch]]:
    """Return where each set of ranks has a part, neighbors joined."""
    by_ranks: dict[Mask, list[Stretch]] = {}
    for span, (block,) in zip(rows, grid, strict=True):
        if block.ranks and not block.is_mixed and span.parts == 1:
            stretches = by_ranks.setdefault(block.ranks, [])
            if stretches and stretches[-1][1] == span.start:
                stretches[-1] = (stretches[-1][0], span.stop)
            else:
                stretches.append((span.start, span.stop))
    return by_ranks


def _shares(stretches: Sequence[Stretch]) -> list[float]:
    """Return the shares of all that they have up to the end of each stretch, 0 first and 1 last."""
    sums = [0, *accumulate(stop - start for start, stop in stretches)]
    return [round(one / sums[-1], 9) for one in sums]


def _range_between(stretches: Sequence[Stretch], start: float, stop: float) -> Stretch:
    """Return the part of the stretches between two shares, which lies in one of them."""
    shares = _shares(stretches)
    which = min(bisect_right(shares, start), len(shares) - 1) - 1
    first, last = stretches[which]
    per_share = (last - first) / (shares[which + 1] - shares[which])
    ends = ((share - shares[which]) * per_share + first for share in (start, stop))
    low, high = (round(end, 6) for end in ends)
    return low, high
