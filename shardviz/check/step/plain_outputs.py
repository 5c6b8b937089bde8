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

UNPLACED = (
    "no placements of {whole}, {whose}, give every rank what it holds (rank {rank}: {held}); the loss and the "
    "gradients are right"
)


def laid_out_by_value(results: Sequence[Compared], dump: Dump | None = None) -> tuple[Compared, ...]:
    """Return results with the plain outputs laid out as their values are, if the loss was computed from them so."""
    loss = next((result for result in results if (result.role, result.name) == ("scalar", "loss")), None)
    if loss is None or loss.incomparable:
        return tuple(results)
    records = dump.files.ranks.values() if dump is not None else ()
    collectives = (call for record in records for call in record.collectives)
    by_loss = (call for call in collectives if not (call.module or call.backward))
    apart = set(loss.copies_differ_along) - {axis for call in by_loss for axis in call.axes}
    return tuple(_by_value(result, loss, apart) if result.is_assumed else result for result in results)


def _by_value(result: Compared, loss: Compared, apart: set[str]) -> Compared:
    if result.claimed is None or not (result.incomparable or result.wrong):
        return result
    layout = layout_of_values(result)
    if layout is not None:
        return _laid_out(result, layout) if _is_read_so(result, layout, loss, apart) else result
    if not result.incomparable and not any(values.shape != result.wanted.shape for values in result.values.values()):
        return result
    parts = [_laid_out(result, layout) for layout in _by_shape(result) if _is_read_so(result, layout, loss, apart)]
    right = [part for part in parts if not part.wrong]
    if not right and not loss.wrong:
        return result
    return next(iter(right), parts[0] if len(parts) == 1 else result)


def _is_read_so(result: Compared, layout: Layout, loss: Compared, apart: set[str]) -> bool:
    """Whether the loss was computed from the parts of a layout: it is right, or put together over its axes."""
    own = set(result.claimed.split_axes) if result.claimed is not None else set()
    return not loss.wrong or not (set(layout.split_axes) - own) & apart


def _by_shape(result: Compared) -> Iterator[Layout]:
    """Yield the layouts with one dim more split over one axis, of which ranks have a part each, padded to one size."""
    placements = result.claimed.placements() if result.claimed is not None else None
    if not placements or any(len(values.shape) != result.wanted.ndim for values in result.values.values()):
        return
    for at, axis in enumerate(result.mesh.axes):
        for dim in range(result.wanted.ndim) if isinstance(placements[at], Replicate) else ():
            split = (*placements[:at], Shard(dim), *placements[at + 1 :])
            layout = Layout.from_placements(result.mesh, result.wanted.shape, split)
            if result.mesh.axis_size(axis) > 1 and all(
                _holds_part(result, layout, dim, rank) for rank in result.values
            ):
                yield layout


def _holds_part(result: Compared, layout: Layout, dim: int, rank: int) -> bool:
    held, due = result.values[rank].shape, layout.region(result.mesh.coord_of(rank)).shape
    size = max(layout.region(result.mesh.coord_of(other)).shape[dim] for other in result.values)
    return held in (due, (*due[:dim], size, *due[dim + 1 :]))


def _laid_out(result: Compared, layout: Layout) -> Compared:
    regions = {rank: layout.region(layout.mesh.coord_of(rank)) for rank in result.values}
    values = {rank: held[tuple(map(slice, regions[rank].shape))] for rank, held in result.values.items()}
    sides = [zip(result.values[rank].shape, values[rank].shape, strict=True) for rank in values]
    cut = next(((dim, held) for shapes in sides for dim, (held, own) in enumerate(shapes) if held > own), None)
    return replace(result, mesh=layout.mesh, claimed=layout, regions=regions, values=values, padded=cut)


def why_unplaced(evidence: Evidence, result: Compared) -> str:
    """Return why a plain part of an output is not judged; empty if it is, or if something behind it is wrong."""
    gradients = evidence.gradients.values()
    is_right = evidence.loss_is_right and bool(gradients) and not any(gradient.wrong for gradient in gradients)
    odd = [rank for rank, values in result.values.items() if values.shape != result.wanted.shape]
    if not (result.is_assumed and result.incomparable and is_right and odd) or evidence.without_gradient:
        return ""
    whole = result.wanted.shape
    for shape in (values.shape for values in result.values.values()):
        if len(shape) != len(whole) or any(own > size for own, size in zip(shape, whole, strict=True)):
            return ""  # larger than the whole, as copies side by side are
    rank = min(odd)
    held = list(result.values[rank].shape)
    return UNPLACED.format(rank=rank, held=held, whole=list(whole), whose=result.whose)
