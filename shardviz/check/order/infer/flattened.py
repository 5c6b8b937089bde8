"""A dim that is split over a flattened axis, looked at along the axes that it was flattened from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.infer.fit import Fit
from shardviz.check.order.infer.layout import infer_layout
from shardviz.explain.splits import Flattened
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.layout.region import Region


def explain_flattened(claimed: Layout, held: Mapping[Coord, Region], run: Mesh) -> Iterator[Fit]:
    """Yield the layout over the run's own axes that is held while one is claimed over an axis flattened from several.

    Args:
        claimed: What the placements say.
        held: What each known coordinate of its mesh holds.
        run: The mesh that the run was asked for.
    """
    mesh = claimed.mesh
    flat = [axis for axis in claimed.split_axes if axis not in run.axes]
    parts = {axis: flattened_from(mesh, axis, run) for axis in flat}
    if not flat or not all(parts.values()) or set(mesh.ranks) != set(run.ranks):
        return
    by_rank = {run.coord_of(mesh.rank_at(coord)): region for coord, region in held.items()}
    layout = infer_layout(run, claimed.index_shape, by_rank)
    if layout is None or claimed.flat is not None:
        return
    made = " and ".join(f"{axis} is {' and '.join(parts[axis])} flattened" for axis in flat)
    words = f"{made}, and the ranks hold {write(layout)}"
    yield Fit(Flattened(_number(parts[flat[0]], run)), words, write(layout), layout)


def flattened_from(mesh: Mesh, axis: str, run: Mesh) -> tuple[str, ...]:
    """Return the run's axes that an axis of another mesh runs along, outermost first; empty for no such axes."""
    group = mesh.groups(axis)[0]
    for width in range(2, run.ndim + 1):
        for first in range(run.ndim - width + 1):
            axes = run.axes[first : first + width]
            if group in run.groups(*axes):
                return axes
    return ()


def _number(axes: tuple[str, ...], run: Mesh) -> str:
    """Spell how flattening counts coordinates."""
    text = axes[0]
    for axis in axes[1:]:
        text = f"{text if text == axes[0] else f'({text})'} * {run.axis_size(axis)} + {axis}"
    return text
