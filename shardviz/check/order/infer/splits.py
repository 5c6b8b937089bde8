"""Shards that follow a different rule than claimed: layout, axis, or a split unlike chunk.

If a layout fits what is held, the difference has a name, and there is a label that would be right. A dim that is split
over a flattened axis is looked at along the axes that it was flattened from. Three splits are not one torch.chunk: the
head-tail order of context parallel, the even split of array_split, and segments of different sizes, each split alone.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING

from shardviz.check.order.case import Fit
from shardviz.check.order.infer.layout import infer_layout, same_region
from shardviz.explain.placement.splits import (
    AcrossSegments,
    AnotherAxis,
    AnotherDim,
    AnotherLayout,
    AnotherOrder,
    Balanced,
    CutInnerFirst,
    Flattened,
    HeadTail,
    MeshOrder,
    Mislabel,
    OneFactor,
    Replicated,
    RoundRobin,
    Segments,
    SegmentsUnderFsdp,
    Split,
    UnequalSegments,
)
from shardviz.layout.notation import order_between, write
from shardviz.layout.placements import Replicate, spell
from shardviz.layout.region import Ranges, Region, length, merge_ranges
from shardviz.layout.splits import JOIN, Chain, axes_in, bind_chain, chunk, follow_with_splits, numbers_in, slice_ranges
from shardviz.layout.splits import Split as Cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh

LABELS_FSDP_OVER_TP = (2, 5)
"""From this version of torch on, FSDP2 labels shards that tensor parallel split before it by _StridedShard."""

NO_LABEL = "no placements (torch has none for this layout: split the tensor again)"


def explain_label(claimed: Layout, held: Layout, torch: str) -> Fit:
    """Name the difference between two layouts, as the torch that wrote the dump labels them."""
    kind = disorder_between(claimed, held)
    if kind is AnotherOrder and _version(torch) >= LABELS_FSDP_OVER_TP:
        kind = CutInnerFirst
    return Fit(_cause(kind, claimed, held), _SENTENCES[kind], write(held), held)


def _cause(kind: type[Disorder], claimed: Layout, held: Layout) -> Disorder:
    """Return the difference between two layouts with what its fix must know of them."""
    placements = right_label(held, claimed.own_axes)
    if kind is AnotherAxis:
        axis = next((axis for axis in claimed.split_axes if axis in splitting(claimed) - splitting(held)), "")
        return AnotherAxis(placements, axis)
    if kind is Segments:
        return Segments(placements, order_between(claimed, held))
    if issubclass(kind, Mislabel):
        return kind(placements)
    return SegmentsUnderFsdp(order_between(claimed, held)) if kind is SegmentsUnderFsdp else OneFactor()


def _version(text: str) -> tuple[int, ...]:
    """Return the major and minor version; (0, 0) if the text is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0, 0)


_SENTENCES: dict[type[Disorder], str] = {
    CutInnerFirst: "the axes split the dim in a different order",
    AnotherOrder: "the axes split the dim in a different order",
    MeshOrder: "the axes split the dim in the mesh's order",
    Segments: "the dim is split segment by segment",
    SegmentsUnderFsdp: "FSDP2 split each rank's segments as one block, and no split_factor describes that",
    AcrossSegments: "the dim is split across its segments",
    RoundRobin: "the dim is dealt out in turn, or segment by segment",
    OneFactor: "several axes split the dim unevenly, and the label's one split_factor fits only even splits",
    AnotherDim: "a different dim is split",
    AnotherAxis: "the dim is split over a different axis",
    Replicated: "the ranks hold copies, the label says shards",
    Split: "the ranks hold shards, the label says copies",
    AnotherLayout: "the tensor is split in a different way",
}


def right_label(held: Layout, own_axes: Sequence[str] = ()) -> str:
    """Return torch's placements of what is held, on the tensor's own axes if no others split it."""
    placements = held.placements()
    if placements is None:
        return NO_LABEL
    by_axis = dict(zip(held.mesh.axes, placements, strict=True))
    other_placements = {placement for axis, placement in by_axis.items() if axis not in own_axes}
    return spell(
        tuple(by_axis[axis] for axis in own_axes) if own_axes and other_placements == {Replicate()} else placements
    )


def splitting(layout: Layout) -> set[str]:
    """Return the axes of more than one rank that split a tensor: the others change nothing."""
    return {*layout.split_axes} & {*layout.mesh.long_axes}


def disorder_between(claimed: Layout, held: Layout) -> type[Disorder]:
    """Return the class of the difference between two layouts of one tensor on one mesh."""
    claimed_axes, held_axes = _axes_by_dim(claimed), _axes_by_dim(held)
    if splitting(held) < splitting(claimed) and not _numbers(held):
        return Replicated
    if splitting(held) > splitting(claimed) and not _numbers(held):
        return Split
    if splitting(held) != splitting(claimed):
        return AnotherAxis if list(map(len, claimed_axes)) == list(map(len, held_axes)) else AnotherLayout
    if [set(axes) for axes in claimed_axes] != [set(axes) for axes in held_axes]:
        return AnotherDim
    if any(map(_has_segments_under_fsdp, claimed.chains)) or any(map(_is_split_again, held.chains)):
        return SegmentsUnderFsdp
    if any(JOIN in chain for chain in claimed.chains) and not _numbers(held):
        return OneFactor
    if not _numbers(claimed) and _is_dealt_out(held):
        return RoundRobin
    if _numbers(claimed) and not _numbers(held):
        return AcrossSegments
    if _numbers(held) != _numbers(claimed):
        return Segments
    if claimed_axes == held_axes:
        return AnotherLayout
    is_held_so = _is_in_mesh_order(held, held_axes)
    return MeshOrder if is_held_so and not _is_in_mesh_order(claimed, claimed_axes) else AnotherOrder


def _is_in_mesh_order(layout: Layout, axes_by_dim: list[list[str]]) -> bool:
    """Whether the axes of each dim split in the mesh's order, as plain `Shard` says."""
    return all(axes == sorted(axes, key=layout.mesh.axis_index) for axes in axes_by_dim)


def _has_segments_under_fsdp(chain: Chain) -> bool:
    """Whether a chain is FSDP2 over segments: `(48/2/dp)/3/tp`, with a number after its join."""
    return JOIN in chain and bool(numbers_in(chain[chain.index(JOIN) :]))


def _is_split_again(chain: Chain) -> bool:
    """Whether segments are split and what a rank has of them is split as one: `(48/3/tp)/dp`."""
    return JOIN in chain and bool(numbers_in(chain[: chain.index(JOIN)]))


def _is_dealt_out(held: Layout) -> bool:
    """Whether every numbered dim is cut into pieces of one index: `8/2/ep` on four ranks."""
    numbered = [(size, chain) for size, chain in zip(held.shape, held.chains, strict=True) if chain in _numbers(held)]
    return bool(numbered) and all(
        len(chain) == 2
        and isinstance(chain[0], int)
        and isinstance(chain[1], str)
        and chain[1] != JOIN
        and size <= chain[0] * held.mesh.axis_size(chain[1])
        for size, chain in numbered
    )


def _axes_by_dim(layout: Layout) -> list[list[str]]:
    """Return each dim's splitting axes in order; axes of one rank split nothing."""
    return [[axis for axis in axes_in(chain) if layout.mesh.axis_size(axis) > 1] for chain in layout.chains]


def _numbers(layout: Layout) -> list[Chain]:
    return [chain for chain in layout.chains if numbers_in(chain)]


def explain_flattened(claimed: Layout, held: Mapping[Coord, Region], run: Mesh) -> Iterator[Fit]:
    """Yield the layout over the run's own axes, held under a claim over a flattened axis."""
    mesh = claimed.mesh
    flat = [axis for axis in claimed.split_axes if axis not in run.axes]
    parts = {axis: flattened_from(mesh, axis, run) for axis in flat}
    if not flat or not all(parts.values()) or set(mesh.ranks) != set(run.ranks):
        return
    by_rank = {run.coord_of(mesh.rank_at(coord)): region for coord, region in held.items()}
    layout = infer_layout(run, claimed.index_shape, by_rank)
    if layout is None or claimed.flat is not None:
        return
    flattened = " and ".join(f"{axis} is {' and '.join(parts[axis])} flattened" for axis in flat)
    words = f"{flattened}, and the ranks hold {write(layout)}"
    yield Fit(Flattened(_number(parts[flat[0]], run)), words, write(layout), layout)


def flattened_from(mesh: Mesh, axis: str, run: Mesh) -> tuple[str, ...]:
    """Return the run's axes that a mesh's axis was flattened from, outermost first, if any."""
    axes = run.axes_along(mesh.groups(axis)[0])
    return axes if len(axes) > 1 else ()


def _number(axes: tuple[str, ...], run: Mesh) -> str:
    """Spell how flattening counts coordinates."""
    text = axes[0]
    for axis in axes[1:]:
        text = f"{text if text == axes[0] else f'({text})'} * {run.axis_size(axis)} + {axis}"
    return text


MAX_SEGMENTS = 16

MAX_PIECES = 1 << 10
"""A dim whose claimed numbers cut it into more pieces than this is not split in other ways."""


def head_tail(ranges: Ranges, parts: int, part: int) -> Ranges:
    """Return chunk `part` of twice as many chunks, and its mirror image.

    torch's context parallel deals out a sequence this way, to balance the load.
    """
    return merge_ranges((*chunk(ranges, 2 * parts, part), *chunk(ranges, 2 * parts, 2 * parts - 1 - part)))


def balanced(ranges: Ranges, parts: int, index: int) -> Ranges:
    """Return the part that numpy.array_split gives: sizes differ by at most 1, longer first."""
    small, longer = divmod(length(ranges), parts)
    first = index * small + min(index, longer)
    return slice_ranges(ranges, first, first + small + (index < longer))


def segmented(bounds: Sequence[int]) -> Cut:
    """Return the split that gives a part of each of the segments between the bounds."""

    def split(_ranges: Ranges, parts: int, part: int) -> Ranges:
        return merge_ranges(range_ for segment in pairwise(bounds) for range_ in chunk((segment,), parts, part))

    return split


def explain_splits(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Fit]:
    """Yield the axes that split a dim head-tail, balanced or by segments, the rest as claimed."""
    kinds: list[tuple[Disorder, str, Cut]] = [
        (HeadTail(), "{axis}=i of {size} holds chunks i and {last}-i of {twice} along dim {dim}", head_tail),
        (Balanced(), "dim {dim} is cut into {size} parts that differ by at most one along {axis}", balanced),
    ]
    if claimed.flat is not None:
        return
    for cause, words, split in kinds:
        for dim, chain in enumerate(claimed.chains):
            for axis in axes_in(chain) if math.prod(numbers_in(chain)) <= MAX_PIECES else ():
                if not _fits(claimed, held, dim, axis, split):
                    continue
                size = claimed.mesh.axis_size(axis)
                text = words.format(axis=axis, size=size, last=2 * size - 1, twice=2 * size, dim=dim)
                yield Fit(cause, text, text)
    yield from _unequal_segments(claimed, held)


def _unequal_segments(claimed: Layout, held: Mapping[Coord, Region]) -> Iterator[Fit]:
    """Yield a dim's unequal segments; each begins where a piece of the axis's first rank begins."""
    for dim, chain in enumerate(claimed.chains):
        axis = chain[0] if len(chain) == 1 else 0
        if not isinstance(axis, str) or claimed.mesh.axis_size(axis) < 2:
            continue
        column = claimed.mesh.axis_index(axis)
        first = next((region.dims[dim] for coord, region in held.items() if coord[column] == 0), ())
        bounds = [*(start for start, _ in first), claimed.shape[dim]]
        rising = bounds[0] == 0 and all(low < high for low, high in pairwise(bounds))
        if 2 < len(bounds) <= MAX_SEGMENTS and rising and _fits(claimed, held, dim, axis, segmented(bounds)):
            sizes = [high - low for low, high in pairwise(bounds)]
            if len(set(sizes)) == 1:
                continue
            text = f"dim {dim} has segments of {', '.join(map(str, sizes))}, each split over {axis}"
            yield Fit(UnequalSegments(), text, text)


def _fits(claimed: Layout, held: Mapping[Coord, Region], dim: int, axis: str, split: Cut) -> bool:
    mesh, chain = claimed.mesh, claimed.chains[dim]
    sizes = dict(mesh.sizes)
    for coord, region in held.items():
        claimed_region = claimed.region(coord)
        position = dict(zip(mesh.axes, coord, strict=True))
        ranges = follow_with_splits(claimed.shape[dim], bind_chain(chain, position, sizes), {chain.index(axis): split})
        if not same_region(Region((*claimed_region.dims[:dim], ranges, *claimed_region.dims[dim + 1 :])), region):
            return False
    return True
