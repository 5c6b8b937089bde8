"""`wrong-placement` of an output: its label gives another shape, and its values are those of another label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.forward.reason import Reason
from shardviz.explain.forward import WrongOutputLabel
from shardviz.layout.candidates import placements_of
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.relate.values import part_of

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared


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
