"""Nested splits: the blocks of the outer ones, one of them open, the others folded.

`[1024/tp/fsdp]` over 8 x 128 ranks has 8 blocks of 128 parts. A picture with room for 20 rows shows the 8 blocks, one
of them open.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardviz.picture.model.mesh import coords_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardviz.picture.model.sides import Sides

    Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a drawn dim.

    Attributes:
        start: Its first index.
        stop: One past its last.
        parts: 1 for a stretch with the same holders throughout, more if parts are not drawn one by one.
        is_block: Whether these parts are one block of an outer split, folded.
    """

    start: int
    stop: int
    parts: int = 1
    is_block: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_left_out(self) -> bool:
        """Whether it stands for parts that are only counted."""
        return self.parts > 1 and not self.is_block

    def title(self, more: str = "…") -> str:
        """Return its indices, or `more` and the number of parts if they are only counted."""
        return f"{more} {self.parts:,}" if self.is_left_out else str(self)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@lru_cache(maxsize=256)
def nest(sides: Sides, dim: int, *, held: bool = False) -> tuple[Indices, ...]:
    """Return the edges of the blocks of a dim's outer splits, coarsest first, without the parts.

    Args:
        sides: Who holds what.
        dim: One of the dims of its holders' shape.
        held: Whether the second side's splits are followed, if there are two, and not the first's.
    """
    stripes = sides.holders.dims[dim]
    if sides.mesh is None or len(stripes.kinds) < 2:
        return ()
    is_first = sides.has_claimed and not (held and sides.has_held)
    lowest = stripes.lowest(0 if is_first else sides.shift, (1 << sides.shift) - 1)
    coords = coords_among(sides.mesh, lowest)
    return _levels(np.diff(coords[stripes.kinds], axis=0), stripes.edges)


def parts_of_claim(sides: Sides, dim: int) -> Indices:
    """Return where the ranks that should hold a dim change, whoever does."""
    return sides.holders.dims[dim].claim_edges((1 << sides.shift) - 1)


def _levels(steps: Indices, edges: Indices) -> tuple[Indices, ...]:
    """Return the edges of each level, from the coordinate steps between neighboring stripes.

    The axis with the fewest steps is the outermost.
    """
    changes = (steps != 0).sum(axis=0)
    steps = steps[:, [axis for axis in np.argsort(changes, kind="stable") if changes[axis]]]
    if not steps.shape[1]:
        return ()
    begins = [steps[:, 0] < 0, *(np.any(steps[:, : count + 1] != 0, axis=1) for count in range(steps.shape[1]))]
    levels, before = [], 1
    finest = int(begins[-1].sum()) + 1
    for begin in begins:
        count = int(begin.sum()) + 1
        if before < count < finest:
            levels.append(np.concatenate([edges[:1], edges[1:-1][begin], edges[-1:]]))
            before = count
    return tuple(levels)


def choose_spans(spans: Sequence[Span], budget: int, first: int, levels: Sequence[Indices] = ()) -> list[Span]:
    """Choose at most `budget` spans: one block opened, other blocks folded, the rest joined.

    Args:
        spans: All spans of a dim.
        budget: How many there may be.
        first: The index of the one whose block is opened.
        levels: The edges of blocks, as `nest` returns them.
    """
    if len(spans) <= budget:
        return list(spans)
    groups = _groups(spans, levels[0]) if levels else []
    if len(groups) < 2:
        return choose_spans(spans, budget, first, levels[1:]) if levels else _keep_ends(spans, budget, first)
    opened = next(at for at in range(len(groups)) if first < sum(map(len, groups[: at + 1])))
    inner = first - sum(map(len, groups[:opened]))
    blocks = [group[0] if len(group) == 1 else join_spans(group, is_block=True) for group in groups]
    shown = _keep_ends(blocks, max(budget - min(len(groups[opened]), budget // 2) + 1, 3), opened)
    if blocks[opened] not in shown:
        return _keep_ends(spans, budget, first)
    at = shown.index(blocks[opened])
    return [*shown[:at], *choose_spans(groups[opened], budget - len(shown) + 1, inner, levels[1:]), *shown[at + 1 :]]


def _groups(spans: Sequence[Span], edges: Indices) -> list[list[Span]]:
    """Return spans by the block that they begin in."""
    blocks = np.searchsorted(edges, [span.start for span in spans], side="right")
    cuts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(spans)]
    return [list(spans[start:stop]) for start, stop in pairwise(cuts)]


def _keep_ends(spans: Sequence[Span], budget: int, first: int) -> list[Span]:
    """Keep the first spans, the last, and those from one on; join the others."""
    count = len(spans)
    if count <= budget:
        return list(spans)
    tail = 2 if budget >= 8 else 1
    room = budget - tail - 1
    kept = set(range(room)) if first < room else {*range(room // 2), *range(first, first + room - room // 2 - 1)}
    kept |= set(range(count - tail, count))
    starts = [at for at in range(count) if at == 0 or at in kept or at - 1 in kept]
    ends = [*starts[1:], count]
    return [spans[at] if end == at + 1 else join_spans(spans[at:end]) for at, end in zip(starts, ends, strict=True)]


def join_spans(spans: Sequence[Span], *, is_block: bool = False) -> Span:
    """Put spans that follow each other into one; `is_block` if they are one block."""
    return Span(spans[0].start, spans[-1].stop, sum(span.parts for span in spans), is_block)
