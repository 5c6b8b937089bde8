"""Ranks that left nothing in a dump: where they are on the mesh, and what they should have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.picture.exhibits.exhibit import MOST_ROWS, Cell, Exhibit, Row, exhibit, title_of

if TYPE_CHECKING:
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


def absent_ranks(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the ranks without a file, or without a shard of a tensor, beside those that have one.

    None where the finding names no ranks: no rank has the tensor then.
    """
    if not finding.ranks:
        return None
    if not finding.tensor:
        there = sorted(set(dump.files.ranks) - set(finding.ranks))
        has = "a damaged file" if set(finding.ranks) & set(dump.files.damaged) else "no file"
        return _beside(dump.files.mesh, None, finding.ranks, (has, "a file"), there)
    tensor = _tensor_without(dump, finding)
    layout = next((layout for layout in tensor.claims if layout is not None), None) if tensor is not None else None
    if tensor is None or layout is None:
        return None
    return _beside(layout.mesh, layout, finding.ranks, ("no shard", "a shard"), sorted(tensor.shards))


def _tensor_without(dump: Dump, finding: Finding) -> Tensor | None:
    return next((tensor for tensor in dump.named(finding.tensor) if not set(tensor.shards) & set(finding.ranks)), None)


def _beside(
    mesh: Mesh, layout: Layout | None, missing: tuple[int, ...], words: tuple[str, str], there: list[int]
) -> Exhibit | None:
    """Lay the first ranks that lack something above all that have it; the last row is always shown."""
    rows = [
        Row(title_of([rank]), (Cell(_place(mesh, rank)), Cell(_part(layout, rank)), Cell(words[0], is_wrong=True)))
        for rank in missing[: MOST_ROWS * 2]
    ]
    others = f"the other {len(there):,} ranks" if len(there) > 1 else title_of(there) if there else ""
    last = [Row(others, (Cell(""), Cell(""), Cell(words[1], is_right=True)), count=len(there))] if there else []
    heads = ("", "on the mesh", "should hold", "has")
    left_out = len(missing) - len(rows)
    return exhibit("what ranks left in the dump", heads, [*rows, *last], left_out, sums_up=bool(last), noun="rank")


def _place(mesh: Mesh, rank: int) -> str:
    if rank not in mesh:
        return ""
    return ", ".join(f"{axis}={position}" for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True))


def _part(layout: Layout | None, rank: int) -> str:
    return str(layout.region(layout.mesh.coord_of(rank))) if layout is not None and rank in layout.mesh else ""
