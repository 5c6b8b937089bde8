"""What it takes to have a whole tensor on every rank: the collectives, one axis after the other, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardviz.layout import JOIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.layout import Chain, Layout


@dataclass(frozen=True, slots=True)
class Step:
    """One collective over one axis.

    Attributes:
        collective: What torch calls it.
        axis: The mesh axis.
        op: The reduction of an all_reduce.
        received: The most elements that any rank takes in. Uneven shards are counted as they are, without the padding
            that torch sends with them; an all_reduce is counted as a ring, 2 (n - 1) / n of what a rank holds.
    """

    collective: Literal["all_gather", "all_reduce"]
    axis: str
    received: int
    op: str = ""


def gather_steps(layout: Layout) -> Iterator[Step]:
    """Yield the collectives that bring all of the tensor to every rank.

    Pending sums are taken first, where what is summed is smallest; then the splits are undone, innermost first.
    """
    for axis, op in layout.partial:
        count = layout.mesh.axis_size(axis)
        largest = max(layout.region(coord).size for coord in layout.mesh.coords())
        yield Step("all_reduce", axis, -(-2 * (count - 1) * largest // count), op)
    layout = replace(layout, partial=())
    while layout.split_axes:
        axis = _innermost(layout)
        whole = replace(layout, chains=tuple(without_axis(chain, axis) for chain in layout.chains))
        received = max(whole.region(coord).size - layout.region(coord).size for coord in layout.mesh.coords())
        yield Step("all_gather", axis, received)
        layout = whole


def _innermost(layout: Layout) -> str:
    """Return the axis to undo: the last split of a dim, and of several the last on the mesh."""
    last = {
        next(link for link in reversed(chain) if _is_axis(link)) for chain in layout.chains if any(map(_is_axis, chain))
    }
    return next(axis for axis in reversed(layout.mesh.axes) if axis in last)


def _is_axis(link: object) -> bool:
    return isinstance(link, str) and link != JOIN


def without_axis(chain: Chain, axis: str) -> Chain:
    """Undo a dim's last split; segments that nothing distributes any more are whole again."""
    if axis not in chain:
        return chain
    left = chain[: chain.index(axis)]
    while left and not _is_axis(left[-1]):
        left = left[:-1]
    return left
