"""Plain outputs: nothing claims how ranks share them, so their layout is read off their values, or off their shape.

A model may return its own columns of the logits, its own tokens or a part that overlaps its neighbor's, and a loss that
reads them so is right. The layout that an output of the batch's rows should have is then no claim that is broken. A
loss that is wrong but equal on all ranks that have different parts, or that is computed with collectives over their
axis, was put together from these: it is wrong for another reason. Columns that pad each part to one size are cut off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.forward.explain import layout_of_values
from shardviz.layout.layout import Layout
from shardviz.layout.placements import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import CollectiveRecord

UNPLACED = (
    "no placements of {whole}, {whose}, give every rank what it holds (rank {rank}: {held}); the loss and the "
    "gradients are right"
)


def laid_out_by_value(results: Sequence[Compared], dump: Dump | None = None) -> tuple[Compared, ...]:
    """Return results with the plain outputs laid out as their values are, if the loss was computed from them so."""
    loss = next((one for one in results if (one.role, one.name) == ("scalar", "loss")), None)
    if loss is None or loss.incomparable:
        return tuple(results)
    records = dump.files.ranks.values() if dump is not None else ()
    called = {axis for record in records for one in record.collectives if _is_of_loss(one) for axis in one.axes}
    apart = set(loss.copies_differ_along) - called
    return tuple(_by_value(one, loss, apart) if one.is_assumed else one for one in results)


def _is_of_loss(one: CollectiveRecord) -> bool:
    """Whether a collective may be one of the loss function's: those of modules and of backward are not."""
    return not one.module and not one.backward


def _by_value(one: Compared, loss: Compared, apart: set[str]) -> Compared:
    if one.claimed is None or not (one.incomparable or one.wrong):
        return one
    layout = layout_of_values(one)
    if layout is not None:
        return _laid_out(one, layout) if _is_read_so(one, layout, loss, apart) else one
    if not one.incomparable and not any(values.shape != one.wanted.shape for values in one.values.values()):
        return one
    parts = [_laid_out(one, layout) for layout in _by_shape(one) if _is_read_so(one, layout, loss, apart)]
    right = [part for part in parts if not part.wrong]
    if not right and not loss.wrong:
        return one
    return next(iter(right), parts[0] if len(parts) == 1 else one)


def _is_read_so(one: Compared, layout: Layout, loss: Compared, apart: set[str]) -> bool:
    """Whether the loss was computed from the parts of a layout: it is right, or put together over its axes."""
    own = set(one.claimed.split_axes) if one.claimed is not None else set()
    return not loss.wrong or not (set(layout.split_axes) - own) & apart


def _by_shape(one: Compared) -> Iterator[Layout]:
    """Yield the layouts with one dim more split over one axis, of which ranks have a part each, padded to one size."""
    placements = one.claimed.placements() if one.claimed is not None else None
    if not placements or any(len(values.shape) != one.wanted.ndim for values in one.values.values()):
        return
    for at, axis in enumerate(one.mesh.axes):
        for dim in range(one.wanted.ndim) if isinstance(placements[at], Replicate) else ():
            split = (*placements[:at], Shard(dim), *placements[at + 1 :])
            layout = Layout.from_placements(one.mesh, one.wanted.shape, split)
            if one.mesh.axis_size(axis) > 1 and all(_holds_part(one, layout, dim, rank) for rank in one.values):
                yield layout


def _holds_part(one: Compared, layout: Layout, dim: int, rank: int) -> bool:
    held, due = one.values[rank].shape, layout.region(one.mesh.coord_of(rank)).shape
    size = max(layout.region(one.mesh.coord_of(other)).shape[dim] for other in one.values)
    return held in (due, (*due[:dim], size, *due[dim + 1 :]))


def _laid_out(one: Compared, layout: Layout) -> Compared:
    regions = {rank: layout.region(layout.mesh.coord_of(rank)) for rank in one.values}
    values = {rank: held[tuple(map(slice, regions[rank].shape))] for rank, held in one.values.items()}
    sides = [zip(one.values[rank].shape, values[rank].shape, strict=True) for rank in values]
    cut = next(((dim, held) for shapes in sides for dim, (held, own) in enumerate(shapes) if held > own), None)
    return replace(one, mesh=layout.mesh, claimed=layout, regions=regions, values=values, padded=cut)


def why_unplaced(evidence: Evidence, one: Compared) -> str:
    """Return why a plain part of an output is not judged; empty if it is, or if something behind it is wrong."""
    gradients = evidence.gradients.values()
    is_right = evidence.loss_is_right and bool(gradients) and not any(gradient.wrong for gradient in gradients)
    odd = [rank for rank, values in one.values.items() if values.shape != one.wanted.shape]
    if not (one.is_assumed and one.incomparable and is_right and odd) or evidence.without_gradient:
        return ""
    if not all(_may_be_part(values.shape, one.wanted.shape) for values in one.values.values()):
        return ""  # larger than the whole, as copies side by side are
    rank = min(odd)
    held, whole = list(one.values[rank].shape), list(one.wanted.shape)
    return UNPLACED.format(rank=rank, held=held, whole=whole, whose=one.whose)


def _may_be_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) == len(whole) and all(own <= size for own, size in zip(shape, whole, strict=True))
