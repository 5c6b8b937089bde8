"""Outputs whose label is not theirs, and plain ones that have none: a layout is read off the values that ranks hold.

A model may return its own columns of the logits, its own tokens or a part that overlaps its neighbor's, and a loss that
reads them so is right. The layout that a plain output of the batch's rows should have is then no claim that is broken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.step.forward.reason import Reason
from shardviz.explain.forward import WrongOutputLabel
from shardviz.layout.candidates import placements_of
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardviz.check.step.compared import Compared
    from shardviz.check.step.evidence import Evidence


def check_label_of_output(one: Compared) -> Reason | None:
    """Return the reason if the values that ranks hold are the unsharded model's under other placements."""
    layout = layout_of_values(one)
    return _of_label(one.claimed, layout) if one.claimed is not None and layout is not None else None


def layout_of_values(one: Compared) -> Layout | None:
    """Return the layout under which an output's values are the unsharded model's on every rank; None if none is."""
    if one.claimed is None or one.claimed.flat or one.role != "output":
        return None
    first = next(iter(one.values))
    for placements, _ in placements_of(one.wanted.shape, one.values[first].shape, one.mesh, first):
        layout = Layout.from_placements(one.mesh, one.wanted.shape, placements)
        if all(_fits(one, layout, rank) for rank in one.values):
            return layout
    return None


def _fits(one: Compared, layout: Layout, rank: int) -> bool:
    region = layout.region(one.mesh.coord_of(rank))
    if region.shape != one.values[rank].shape:
        return False
    return one.near(one.values[rank], part_of(one.wanted, region))


def _of_label(claimed: Layout, layout: Layout) -> Reason:
    labeled, due = (", ".join(map(str, one.placements() or ())) for one in (claimed, layout))
    return Reason(
        WrongOutputLabel(labeled, due),
        f"what ranks hold is the unsharded model's output under ({due}): {write(layout)}",
        held=write(layout),
    )


UNPLACED = (
    "no placements of {whole}, {whose}, give every rank what it holds (rank {rank}: {held}); the loss and the "
    "gradients are right"
)


def laid_out_by_value(results: Sequence[Compared]) -> tuple[Compared, ...]:
    """Return results with the plain outputs laid out as their values are, if the loss computed from them is right."""
    losses = [one for one in results if (one.role, one.name) == ("scalar", "loss")]
    is_right = any(not loss.incomparable and not loss.wrong for loss in losses)
    return tuple(_by_value(one) if is_right and one.is_assumed else one for one in results)


def _by_value(one: Compared) -> Compared:
    layout = layout_of_values(one) if one.incomparable or one.wrong else None
    if layout is None:
        return one
    regions = {rank: layout.region(layout.mesh.coord_of(rank)) for rank in one.values}
    return replace(one, mesh=layout.mesh, claimed=layout, regions=regions)


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
