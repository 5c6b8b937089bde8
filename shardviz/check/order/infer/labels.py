"""A layout fits what is held, but it is another than the claimed one: what the difference is called, and the label
that would be right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardviz.check.order.infer.fit import Fit
from shardviz.explain.splits import (
    AcrossSegments,
    AnotherAxis,
    AnotherDim,
    AnotherLayout,
    AnotherOrder,
    CutInnerFirst,
    MeshOrder,
    Mislabel,
    OneFactor,
    Replicated,
    RoundRobin,
    Segments,
    SegmentsUnderFsdp,
    Split,
)
from shardviz.layout.notation import write
from shardviz.layout.placements import Replicate, spell
from shardviz.layout.splits import JOIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.explain.order import Disorder
    from shardviz.layout.layout import Layout
    from shardviz.layout.splits import Chain

LABELS_FSDP_OVER_TP = (2, 5)
"""From this version of torch on, FSDP2 labels shards that tensor parallel split before it by _StridedShard."""

NO_LABEL = "no placements (torch has none for this layout: split the tensor again)"


def explain_label(claimed: Layout, held: Layout, torch: str = "") -> Fit:
    """Name the difference between the claimed and the held layout.

    Args:
        claimed: What the placements say.
        held: What the ranks hold.
        torch: The version of torch that wrote the placements; empty where it is not known.
    """
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
    if issubclass(kind, Mislabel):
        return kind(placements)
    return SegmentsUnderFsdp(_free_dims(claimed, held)) if kind is SegmentsUnderFsdp else OneFactor()


def _version(text: str) -> tuple[int, ...]:
    """Return the major and minor version; (0, 0) where the text is none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _free_dims(claimed: Layout, held: Layout) -> tuple[int, ...]:
    """Return the dims that FSDP2 can split instead of one that has segments."""
    return tuple(dim for dim, chain in enumerate(held.chains) if not chain and claimed.shape[dim] > 1)


_SENTENCES: dict[type[Disorder], str] = {
    CutInnerFirst: "the axes split the dim in another order",
    AnotherOrder: "the axes split the dim in another order",
    MeshOrder: "the axes split the dim in the order of the mesh",
    Segments: "the dim is split segment by segment",
    SegmentsUnderFsdp: "FSDP2 split each rank's segments as one block, which the label's split_factor cannot say",
    AcrossSegments: "the dim is split across its segments",
    RoundRobin: "the dim is dealt out in turn, or segment by segment",
    OneFactor: "the label has one split_factor for several splits, which is right only for equal parts",
    AnotherDim: "another dim is split",
    AnotherAxis: "the dim is split over another axis",
    Replicated: "copies are held where shards are claimed",
    Split: "shards are held where copies are claimed",
    AnotherLayout: "the tensor is split in another way",
}


def right_label(held: Layout, own_axes: Sequence[str] = ()) -> str:
    """Return torch's spelling of the placements that say what is held.

    Args:
        held: What ranks hold.
        own_axes: The axes of the tensor's own mesh, for which it is spelled if no other axis splits the tensor.
    """
    placements = held.placements()
    if placements is None:
        return NO_LABEL
    by_axis = dict(zip(held.mesh.axes, placements, strict=True))
    others = {placement for axis, placement in by_axis.items() if axis not in own_axes}
    return spell(tuple(by_axis[axis] for axis in own_axes) if own_axes and others == {Replicate()} else placements)


def splitting(layout: Layout) -> set[str]:
    """Return the axes of more than one rank that split a tensor: the others change nothing."""
    return {axis for axis in layout.split_axes if layout.mesh.axis_size(axis) > 1}


def disorder_between(claimed: Layout, held: Layout) -> type[Disorder]:
    """Return the class of the difference between two layouts of one tensor on one mesh."""
    ours, theirs = _axes_by_dim(claimed), _axes_by_dim(held)
    if splitting(held) < splitting(claimed) and not _numbers(held):
        return Replicated
    if splitting(held) > splitting(claimed) and not _numbers(held):
        return Split
    if splitting(held) != splitting(claimed):
        return AnotherAxis if list(map(len, ours)) == list(map(len, theirs)) else AnotherLayout
    if [set(axes) for axes in ours] != [set(axes) for axes in theirs]:
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
    if ours == theirs:
        return AnotherLayout
    return MeshOrder if _is_in_mesh_order(held, theirs) and not _is_in_mesh_order(claimed, ours) else AnotherOrder


def _is_in_mesh_order(layout: Layout, axes_by_dim: list[list[str]]) -> bool:
    """Whether the axes that split a dim do so from the mesh's first to its last, as `Shard` alone says it."""
    return all(axes == sorted(axes, key=layout.mesh.axis_index) for axes in axes_by_dim)


def _has_segments_under_fsdp(chain: Chain) -> bool:
    """Whether a label's chain is that of FSDP2 over segments: `(48/2/dp)/3/tp`, with a number after its join."""
    return JOIN in chain and any(isinstance(link, int) for link in chain[chain.index(JOIN) :])


def _is_split_again(chain: Chain) -> bool:
    """Whether segments are split and what a rank has of them is split as one: `(48/3/tp)/dp`."""
    return JOIN in chain and any(isinstance(link, int) for link in chain[: chain.index(JOIN)])


def _is_dealt_out(held: Layout) -> bool:
    """Whether every dim that has a number is cut so small that each piece has one index: `8/2/ep` on four ranks."""
    found = [(size, chain) for size, chain in zip(held.shape, held.chains, strict=True) if chain in _numbers(held)]
    return bool(found) and all(
        len(chain) == 2
        and isinstance(chain[0], int)
        and isinstance(chain[1], str)
        and chain[1] != JOIN
        and size <= chain[0] * held.mesh.axis_size(chain[1])
        for size, chain in found
    )


def _axes_by_dim(layout: Layout) -> list[list[str]]:
    """Return each dim's splitting axes in order; axes of one rank split nothing."""
    return [
        [link for link in chain if isinstance(link, str) and link != JOIN and layout.mesh.axis_size(link) > 1]
        for chain in layout.chains
    ]


def _numbers(layout: Layout) -> list[Chain]:
    return [chain for chain in layout.chains if any(isinstance(link, int) for link in chain)]
